"""Hold the tensors of an adapter to what `adapter_config.json` beside them records of them.

PEFT builds an adapter's matrices by the configuration and then fills them: of another rank it
refuses them, and what the configuration does not name it leaves out. So another rank is damage, the
configuration of another run or the tensors of one. What other versions and variants may count
otherwise (a field that is not known, a pattern that is not matched here) is a warning at most.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint, TensorInfo
from ftckpt.errors import (
    CorruptError,
    FtckptError,
    NewerWriterError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.findings import Finding, counted, finding, from_error, listed
from ftckpt.formats.huggingface.config import ADAPTER_CONFIG, parsed_json

from .config import AdapterConfig, AdapterFields, fields_of, require_affordable, unknown_fields
from .patterns import compiled, ends_with
from .tensors import PREFIX, ROLES

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_BASE = ".base_layer"
# A model that is saved as it is in memory has the adapter's name in those of its matrices.
_DEFAULT = re.compile(r"(\.lora_(?:A|B|embedding_A|embedding_B|magnitude_vector))\.default\b")
_FIRST, _SECOND = ("A", "embedding_A"), ("B", "embedding_B")


class _Module(NamedTuple):
    """An adapted module.

    Attributes:
        name: as the base calls it.
        outer: the modules that it lies in and that were wrapped too, as the base calls them.
        nested: whether PEFT wrapped something in it, or it in something.
        parts: its tensors by role.
    """

    name: str
    outer: Sequence[str]
    nested: bool
    parts: dict[str, TensorInfo]


class _Ranked(NamedTuple):
    """What the matrices of one module have.

    Attributes:
        rank: that of all of them; 0 where they do not tell it alike.
        wrong: those that are not as recorded, in words.
        stacked: whether they are of several experts, one behind the other.
        plain: whether no pattern records a rank for it.
    """

    rank: int
    wrong: Sequence[str]
    stacked: bool
    plain: bool


def check_recorded(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield where adapters are not those that the `adapter_config.json` beside them records."""
    for file in checkpoint.source.entries:
        folder, name = posixpath.split(file)
        if name != ADAPTER_CONFIG:
            continue
        modules = _modules(
            one
            for one in checkpoint.tensors.values()
            if one.pieces and posixpath.dirname(one.pieces[0].extent.file) == folder
        )
        try:
            said = parsed_json(checkpoint.source, file) if modules else {}
        except (CorruptError, UnsafeError):  # said where JSON is checked
            continue
        if said.get("peft_type") == "LORA":
            yield from _Recorded(said, file).check(modules)


def _modules(tensors: Iterable[TensorInfo]) -> list[_Module]:
    found: dict[tuple[str, str], _Module] = {}
    for info in tensors:
        name = _DEFAULT.sub(r"\1", info.name)
        end = next((one for one in ROLES if name.endswith(one)), "")
        if not end or not name.startswith(PREFIX):
            continue
        bare = name.removeprefix(PREFIX).removesuffix(end)
        inner = info.pieces[0].extent.file, bare
        if inner not in found:
            outer, rest = [], bare
            while _BASE in rest:
                rest = rest.rpartition(_BASE)[0]
                outer.append(rest.replace(_BASE, ""))
            found[inner] = _Module(bare.replace(_BASE, ""), outer, bool(outer), {})
        found[inner].parts[ROLES[end]] = info
    wrapped = {outer for one in found.values() for outer in one.outer}
    return [one._replace(nested=one.nested or one.name in wrapped) for one in found.values()]


class _Recorded:
    """What one configuration says of the modules beside it."""

    def __init__(self, said: Mapping[str, Any], file: str) -> None:
        self.said = said
        self.file = file
        self.rank = 0
        self.ranks: Mapping[str, int] = {}
        self.parameters: Sequence[str] = ()
        self.unmatched = False  # whether a pattern is not matched here: all ranks are possible

    def check(self, modules: Sequence[_Module]) -> Iterator[Finding]:
        if "r" not in self.said:
            return
        fields = AdapterFields(self.said, self.file, self.file)
        try:
            self.rank = fields.rank("r", 0)
            patterns = fields.table("rank_pattern")
            self.ranks = {one: fields.rank_in(one, value) for one, value in patterns.items()}
            self.parameters = fields.list_of("target_parameters")
            require_affordable([*self.ranks], [one.name for one in modules])
        except (CorruptError, NewerWriterError) as error:
            yield from_error(error)
            return
        except UnsupportedError:
            self.unmatched = True
        yield from self._other_ranks(modules)
        yield from self._untold(modules)

    def _other_ranks(self, modules: Sequence[_Module]) -> Iterator[Finding]:
        wrong: list[str] = []
        unsure: list[str] = []
        sorts: dict[str, list[_Ranked]] = defaultdict(list)
        for one in modules:
            found = self._ranked(one)
            if found is not None:
                sorts[_NUMBER.sub("#", one.name)].append(found)
        fits = any(not found.wrong for sort in sorts.values() for found in sort)
        for sort, members in sorts.items():
            # Trainers give experts a rank of their own and record none: NeMo divides the one that
            # is recorded by how many are active. Lost is what other experts of the sort still have.
            ranks = {found.rank for found in members}
            own = fits and "expert" in sort and len(members) > 1 and len(ranks) == 1
            own = own and ranks != {0} and all(found.wrong and found.plain for found in members)
            for found in members:
                (unsure if own or found.stacked else wrong).extend(found.wrong)
        odd = unknown_fields(self.said)
        for kind, names, but in (
            ("state-unknown" if odd else "shape-mismatch", wrong,
             f" (and {listed(odd)}, which may change them)" if odd else ""),
            ("state-unknown", unsure, " (and experts may have a rank of their own)"),
        ):  # fmt: skip
            if names:
                what = counted(len(names), "matrix has", "matrices have")
                message = f"{self.file} records other ranks{but} than {what}: {listed(names, 3)}"
                yield finding(kind, message, file=self.file)

    def _ranked(self, one: _Module) -> _Ranked | None:
        """Return the rank of a module; None where its pair does not tell one.

        A matrix of three axes is that of a convolution, `(rank, in, k)` and `(out, rank, 1)`, or
        of experts one behind the other, `(experts, rank, in)` and `(experts, out, rank)`, of which
        all may share one. Nothing says which, so it is wrong where neither reading fits.
        """
        ranks, many = self._possible(one)
        sides = [(one.parts[s], 0) for s in _FIRST if s in one.parts]
        sides += [(one.parts[s], 1) for s in _SECOND if s in one.parts]
        sides = [(info, axis) for info, axis in sides if info.numel and len(info.shape) > axis]
        plain = {info.shape[axis] for info, axis in sides if len(info.shape) == 2}
        sliced = _is_slice(sides, ranks)
        if not sides or (len(plain) > 1 and not sliced):
            return None  # no pair, or one of a fork's groups: that is said where pairs are checked
        wrong = [
            info
            for info, axis in sides
            if not any(_is_of(info.shape, axis, rank, many=many) for rank in ranks)
        ]
        stacked = _rank_of_experts(sides)
        if stacked and any(_is_rank(stacked, rank, many=many) for rank in ranks):
            wrong = []
        said = " or ".join(map(str, sorted(ranks)))
        names = [f"{info.name} of {list(info.shape)} is to be of rank {said}" for info in wrong]
        if sliced:
            names = [f"{said}, as the other matrix is: it is one rank's slice" for said in names]
        rank = stacked or (plain.pop() if len(plain) == 1 else 0)
        return _Ranked(rank, names, bool(stacked), ranks == {self.rank})

    def _possible(self, one: _Module) -> tuple[set[int], bool]:
        """Return the ranks that a module may have, and whether there are several experts of one.

        PEFT nests the adapters of a module's parameters and does not say which is whose, and gives
        what lies in a module that it wraps as a whole (attention) the rank of that.
        """
        named = [
            f"{one.name}.{name}" if not head else f"{one.name}.{name.rpartition('.')[2]}"
            for name in self.parameters
            for head in [name.rpartition(".")[0]]
            if not head or f".{one.name}".endswith(f".{head}")
        ]
        names = [one.name, *one.outer, *named]
        return {rank for name in names for rank in self._ranks_of(name)}, bool(named)

    def _ranks_of(self, name: str) -> set[int]:
        """Return the rank by the first pattern; before PEFT 0.15 it matched behind a dot alone."""
        if self.unmatched:
            return {self.rank, *self.ranks.values()}
        found = {self.ranks[name]} if name in self.ranks else set()
        try:
            for older in (False, True):
                matching = (
                    rank
                    for pattern, rank in self.ranks.items()
                    if (_older(pattern, name) if older else ends_with(pattern, name))
                )
                found.add(next(matching, self.rank))
        except UnsupportedError:
            return {self.rank, *self.ranks.values()}
        return found

    def _untold(self, modules: Sequence[_Module]) -> Iterator[Finding]:
        """Yield modules that the configuration does not name, and magnitudes that it does."""
        yield from self._magnitudes(modules)
        try:
            config = fields_of(self.said, self.file)
            config.require_affordable(one.name for one in modules)
            unused = [one.name for one in modules if not self._trains(config, one)]
        except FtckptError:  # a pattern or a value that only the merge needs
            return
        if unused and not config.tying and not unknown_fields(self.said):
            many = counted(len(unused), "module")
            message = f"target_modules does not name {many} with tensors: {listed(unused, 3)}"
            yield finding("state-unknown", message, file=self.file)

    def _magnitudes(self, modules: Sequence[_Module]) -> Iterator[Finding]:
        """Yield magnitudes that are recorded and not there; that takes no pattern."""
        if self.said.get("use_dora") is not True:
            return
        linear = [one for one in modules if {"A", "B"} <= one.parts.keys() and not one.nested]
        without = [one.name for one in linear if "magnitude" not in one.parts]
        if without:
            kind = "missing-tensor" if len(without) < len(linear) else "state-unknown"
            message = f"use_dora is set, and {listed(without, 3)} has no magnitude"
            yield finding(kind, message, file=self.file)

    def _trains(self, config: AdapterConfig, one: _Module) -> bool:
        if not config.targets or one.nested or self._possible(one)[1]:
            return True
        return config.trains(one.name)


def _older(pattern: str, name: str) -> bool:
    return compiled(rf".*\.{pattern}$").matches(name, whole=False)


def _is_slice(sides: Sequence[tuple[TensorInfo, int]], ranks: Collection[int]) -> bool:
    """Whether the second matrices are as recorded, and the first have fewer rows.

    FSDP cuts each matrix along its rows. accelerate wrote the first rank's part of an adapter alone
    (accelerate#4206): the rank stands in the rows of A, and in the columns of B.
    """
    first = {info.shape[0] for info, axis in sides if not axis and len(info.shape) == 2}
    second = {info.shape[1] for info, axis in sides if axis and len(info.shape) == 2}
    if len(first) != 1 or len(second) != 1:
        return False
    return second <= set(ranks) and max(first) < max(second)


def _is_of(shape: Sequence[int], axis: int, rank: int, *, many: bool) -> bool:
    size = shape[axis]
    if axis and len(shape) > 2:  # a convolution of groups divides it by them
        return size > 0 and not rank % size
    return _is_rank(size, rank, many=many)


def _is_rank(size: int, rank: int, *, many: bool) -> bool:
    return size == rank or (many and size > 0 and not size % rank)


def _rank_of_experts(sides: Sequence[tuple[TensorInfo, int]]) -> int:
    """Return the rank of matrices that lie one behind the other, one for each expert; 0 for none.

    Both sides must agree in it, and in how many experts there are, where they do not share one.
    """
    stacks = {info.shape[0] for info, _ in sides if len(info.shape) == 3} - {1}
    ranks = {info.shape[axis - 2] for info, axis in sides}
    known = len(sides) == 2 and max(len(info.shape) for info, _ in sides) == 3
    return ranks.pop() if known and len(stacks) <= 1 and len(ranks) == 1 else 0
