"""Fit the tensors of a source to an example: its names, shapes and types, the source's values.

Nothing is made up: what the example has and the source lacks is refused by name, and what the
source has and the example has no place for is listed. Values change in two ways alone, both
DeepSpeed's own: a trained weight is its master in the compute type, and where the source keeps no
master the weight, widened, is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind, TensorInfo, tensor_key
from ftckpt.checkpoint.dtypes import DType, decode_scalar
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.digests.tensors import digest_tensor
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import Finding, finding, listed
from ftckpt.formats.deepspeed.job import STEP, DeepSpeedJob
from ftckpt.formats.deepspeed.job.rank_states import RANK_COMPONENT
from ftckpt.formats.deepspeed.job.read import COPIES
from ftckpt.formats.deepspeed.universal.writer import ParameterCuts
from ftckpt.transfer.content import Content, TargetTensor
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.request.change_dtype import CASTABLE

_SLICE = "extra:tp"
_SHOWN = 3
Numbers = Mapping[str, Mapping[str, Any]]


class FittedContent:
    """The content that a result laid out as an example holds.

    Attributes:
        content: it. Tensors of other components, which are no model's, are kept as they were.
        unplaced: keys of tensors that the example has no place for.
        numbers: parameter -> leaf -> value, of what is stored as plain numbers.
        notes: what the user should know.
    """

    def __init__(
        self, content: Content, job: DeepSpeedJob, request: LayoutRequest, numbers: Numbers
    ) -> None:
        """Fit every tensor.

        Args:
            content: what is to be written.
            job: of the example.
            request: may have rules for buffers, and the true size of a vocabulary.
            numbers: parameter -> leaf -> value of the source's states that are no tensors.

        Raises:
            UnsupportedError: something of the example is not there, or is of another shape.
        """
        self._given, self._job, self._example = content, job, job.checkpoint
        self._cuts, self._rules = ParameterCuts(job.states[0], request), request.rules
        self.numbers, self._used = counters_of(content, job, numbers)
        self._widened: list[str] = []
        self._cast: list[str] = []
        self._resized: list[str] = []
        made = {wanted.key: wanted for wanted in (*self._fitted(), *self._unseen())}
        others = [w for w in content.tensors.values() if _is_other(w)]
        self.unplaced = sorted(self._left(made) - {wanted.key for wanted in others})
        tied = {a: b for a, b in self._example.aliases.items() if {a, b} <= made.keys()}
        for alias, owner in tied.items():
            require_tied(made[alias], made[owner], content.checkpoint)
        tensors = {**made, **{wanted.key: wanted for wanted in others}}
        self.content = replace(content, tensors=tensors, aliases=tied)
        self.notes = list(self._remarks())

    def _fitted(self) -> Iterator[TargetTensor]:
        """Yield what the example has.

        Raises:
            UnsupportedError: the source lacks some of it.
        """
        missing: list[TensorInfo] = []
        for info in self._example.tensors.values():
            if info.component.startswith(RANK_COMPONENT):
                continue
            found = self._found(info)
            if found is not None:
                yield self._shaped(found, info)
            elif not self._is_number(info):
                missing.append(info)
        if missing:
            raise self._lacking(missing)

    def _is_number(self, info: TensorInfo) -> bool:
        """Say whether the source has a plain number where the example has a tensor."""
        name, _, leaf = info.name.rpartition(".")
        return info.kind is Kind.OTHER and leaf in self.numbers.get(name, ())

    def _found(self, info: TensorInfo) -> TargetTensor | None:
        """Return the source's values of one of the example's tensors, in its name and type."""
        name, dtype = info.name, info.dtype
        own = self._own(info)
        if info.kind is Kind.MASTER and own is None:
            own = self._lookup("model", Kind.PARAM, name)
            if own is None or not widens(own.dtype, dtype):
                return None
            self._widened.append(name)
        if own is not None and info.kind is Kind.PARAM:
            require_asked(own, info, self._given.checkpoint)
        if info.kind is Kind.PARAM and name in self._job.trained:
            master = self._lookup("optimizer", Kind.MASTER, name)
            if master is not None and (own is None or own.dtype is not dtype):
                self._mark(own)
                own = master
                self._cast.append(name)
        if own is None:
            return None
        self._mark(own)
        if own.dtype is not dtype:
            require_castable(own, info)
            if info.component == "model" and name not in self._cast:
                self._cast.append(name)
        return own._replace(component=info.component, kind=info.kind, name=name, dtype=dtype)

    def _own(self, info: TensorInfo) -> TargetTensor | None:
        key = f"{info.component}:{info.name}" if info.component.startswith(_SLICE) else None
        found = self._given.tensors.get(key) if key else None
        found = found or self._lookup(info.component, info.kind, info.name)
        return found or (self._of_slices(info) if info.kind is Kind.BUFFER else None)

    def _lookup(self, component: str, kind: Kind, name: str) -> TargetTensor | None:
        """Return what the source has under a key, or under that of a tie: its own or the job's."""
        if component.startswith(_SLICE):
            return None
        key, tensors = tensor_key(component, kind, name), self._given.tensors
        for one in (key, self._given.aliases.get(key), self._example.aliases.get(key)):
            if one is not None and one in tensors:
                return tensors[one]
        owner = self._job.shared.get(name)
        return tensors.get(tensor_key(component, kind, owner)) if owner is not None else None

    def _of_slices(self, info: TensorInfo) -> TargetTensor | None:
        """Return a buffer that a rule of the user's calls the same on every tensor slice.

        Raises:
            UnsupportedError: the source's slices differ.
        """
        rule = None if self._rules is None else self._rules.get(info.name)
        if rule is None or rule.split.axis is not None:
            return None
        buffers = (w for w in self._given.tensors.values() if w.kind is Kind.BUFFER)
        copies = [w for w in buffers if w.name == info.name]
        keys = [copy.key for wanted in copies for copy in wanted.copies]
        if len({read_tensor(self._given.checkpoint, key) for key in keys}) > 1:
            raise UnsupportedError(
                f"{info.name} is not the same on every tensor slice", tensor=info.name
            )
        self._used.update(wanted.key for wanted in copies)
        return copies[0] if copies else None

    def _mark(self, wanted: TargetTensor | None) -> None:
        if wanted is not None:
            self._used.add(wanted.key)

    def _shaped(self, wanted: TargetTensor, info: TensorInfo) -> TargetTensor:
        """Return a tensor in the example's shape; the padding of a vocabulary is made anew.

        Raises:
            UnsupportedError: it is of another shape.
        """
        if wanted.shape == info.shape:
            return wanted
        fitted = self._cuts.padded(wanted, info.shape)
        if fitted is None:
            raise UnsupportedError(
                f"{info.key} is of shape {list(wanted.shape)}, and {list(info.shape)} in the"
                " example: they are of different models",
                hint="a vocabulary that is padded otherwise: --true-vocab-size says its rows",
                tensor=info.key,
            )
        self._resized.append(info.name)
        return fitted

    def _unseen(self) -> Iterator[TargetTensor]:
        """Yield the state of parameters that the example's optimizer has never stepped."""
        known = {
            name
            for info in self._example.tensors.values()
            if info.component == "optimizer" and info.kind is not Kind.MASTER
            for name in (info.name, info.name.rpartition(".")[0])
        }
        trained: set[str] = set()
        for mp, number in self._job.param_groups():
            names = self._job.members(mp, number)
            trained.update(names)
            if self._job.numbers[mp][number]:
                known.update(names)
        trained -= known
        shapes = {name: placed.shape for name, placed in self._job.placed.items()}
        for wanted in self._given.tensors.values():
            if wanted.component != "optimizer" or wanted.kind is Kind.MASTER:
                continue
            name = wanted.name
            if wanted.kind is Kind.OTHER and name not in trained:
                name = name.rpartition(".")[0]
            if name in trained:
                self._mark(wanted)
                shape = wanted.shape and shapes[name]
                like = TensorInfo("optimizer", wanted.name, wanted.kind, shape, wanted.dtype, ())
                yield self._shaped(wanted, like)

    def _left(self, made: Mapping[str, TargetTensor]) -> set[str]:
        """Return the keys of tensors that nothing of the result was made of."""
        tied = {key for key, owner in self._given.aliases.items() if owner in self._used}
        stage3 = self._job.stage == 3
        return {
            key
            for key, wanted in self._given.tensors.items()
            if key not in self._used
            and key not in tied
            and wanted.component != COPIES
            and not (stage3 and wanted.key in self._job.trained)
        }

    def _lacking(self, missing: Sequence[TensorInfo]) -> UnsupportedError:
        """Return the error about what the source lacks."""
        names = {info.name for info in missing if info.kind in _NAMED}
        more = sorted(
            w.name
            for key, w in self._given.tensors.items()
            if key not in self._used and w.kind in _NAMED and not _is_other(w)
        )
        if names and more:
            return UnsupportedError(
                f"the example has {listed(sorted(names), _SHOWN)}, which the source lacks, and the"
                f" source has {listed(list(dict.fromkeys(more)), _SHOWN)}, which the example lacks",
                hint="--rename gives the source's parameters the example's names",
                tensor=min(names),
            )
        keys = [info.key for info in missing]
        return UnsupportedError(
            f"the example has {listed(keys, _SHOWN)}, and the source does not",
            hint="an example of the same model with the same optimizer is needed",
            tensor=keys[0],
        )

    def _remarks(self) -> Iterator[Finding]:
        for names, what in (
            (self._widened, "has no master: the weight, widened, is one"),
            (self._cast, "is cast to the type of the example, as DeepSpeed makes its weights"),
            (self._resized, "is padded as the example pads the vocabulary"),
        ):
            if names:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                yield finding("note", f"{names[0]} {what}{more}", tensor=names[0])


_NAMED = (Kind.PARAM, Kind.MASTER, Kind.BUFFER)


def _is_other(wanted: TargetTensor) -> bool:
    """Say whether a tensor is not a model's: random states, averages, a client's own."""
    known = wanted.component in ("model", "optimizer", COPIES)
    return not known and not wanted.component.startswith(_SLICE)


def widens(dtype: DType, to: DType) -> bool:
    """Say whether every value of a type has itself in another one."""
    castable = {dtype.name, to.name} <= CASTABLE
    return dtype is to or (castable and dtype.bits < to.bits)


def require_castable(wanted: TargetTensor, info: TensorInfo) -> None:
    """Refuse a tensor that DeepSpeed would not make of the source's.

    Weights are cast to the compute type; an optimizer's state is never rounded.

    Args:
        wanted: of the source.
        info: of the example.

    Raises:
        UnsupportedError: it is of a type that cannot be cast, or would be rounded.
    """
    weight = info.component == "model" and {wanted.dtype.name, info.dtype.name} <= CASTABLE
    if not weight and not widens(wanted.dtype, info.dtype):
        raise UnsupportedError(
            f"{info.key} is {wanted.dtype.name}, and {info.dtype.name} in the example",
            tensor=info.key,
        )


def require_asked(wanted: TargetTensor, info: TensorInfo, source: Checkpoint) -> None:
    """Refuse a type that the user wants and the example has not.

    Raises:
        UsageError: the content has another type than its source, and so has the example.
    """
    stored = {source.tensors[copy.key].dtype for copy in wanted.copies}
    if wanted.dtype is not info.dtype and wanted.dtype not in stored:
        raise UsageError(
            f"--dtype contradicts --like: {info.key} is {info.dtype.name} in the example",
            hint="leave one of them out",
        )


def require_tied(alias: TargetTensor, owner: TargetTensor, source: Checkpoint) -> None:
    """Refuse to tie what the source holds apart, unless it is the same bit for bit; reads both.

    Raises:
        UnsupportedError: they differ, or are put together otherwise.
    """

    def digest(key: str) -> str:
        return digest_tensor(source, source.tensors[key])

    alike = len(alias.copies) == len(owner.copies)
    for one, other in zip(alias.copies, owner.copies, strict=False):
        keys = {source.aliases.get(copy.key, copy.key) for copy in (one, other)}
        same = len(keys) == 1 or len({*map(digest, keys)}) == 1
        alike = alike and same and (one.box, one.source) == (other.box, other.source)
    if not alike:
        raise UnsupportedError(
            f"{alias.key} is the same as {owner.key} in the example, and another in the source",
            hint="an example of a job that does not tie them",
            tensor=alias.key,
        )


class Counters(NamedTuple):
    """What is stored as plain numbers.

    Attributes:
        numbers: parameter -> leaf -> value.
        used: keys of the source's tensors that became numbers.
    """

    numbers: dict[str, dict[str, Any]]
    used: set[str]


def counters_of(content: Content, example: DeepSpeedJob, numbers: Numbers) -> Counters:
    """Make plain numbers of the counters that an example has as such.

    Args:
        content: what is to be written.
        example: the job that the result is laid out for.
        numbers: parameter -> leaf -> value of the source's states that are no tensors.

    Raises:
        UnsupportedError: a counter of the example is not there, or is not such a number.
    """
    made = Counters({name: dict(own) for name, own in numbers.items()}, set())
    for mp, number in example.param_groups():
        counters = example.numbers[mp][number]
        if example.counts_in_settings(mp, number):
            counters = {**counters, STEP: example.settings[mp][number][STEP]}
        for leaf, like in counters.items():
            for name in example.members(mp, number):
                if leaf not in made.numbers.setdefault(name, {}):
                    key = tensor_key("optimizer", Kind.OTHER, f"{name}.{leaf}")
                    made.numbers[name][leaf] = _number(content, key, like)
                    made.used.add(key)
    return made


def _number(content: Content, key: str, like: Any) -> Any:
    """Return a tensor's value as a number of the type of another."""
    wanted = content.tensors.get(key)
    value = None if wanted is None else _scalar(content, wanted)
    if value is None or type(like) not in (int, float) or type(like)(value) != value:
        raise UnsupportedError(
            f"{key} is not there as a number, and the example has it", tensor=key
        )
    return type(like)(value)


def _scalar(content: Content, wanted: TargetTensor) -> float | None:
    if wanted.shape != () or len(wanted.copies) != 1:
        return None
    return decode_scalar(wanted.dtype, read_tensor(content.checkpoint, wanted.copies[0].key))
