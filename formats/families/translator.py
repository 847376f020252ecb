"""Translate tensors between Megatron-core's spelling and Hugging Face's, optimizer state and all.

A parameter of one side is one of the other, or is made of several (`joins`, `experts`). Masters,
moments and averages are made as their parameter is. Every element of the result is an element of
the source, so that going there and back gives the same bits; the one exception is a row that says
how its elements are `stored` (`offsets`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, NamedTuple

from ftckpt.checkpoint import Box
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import counted, listed
from ftckpt.formats.huggingface.config import CONFIG
from ftckpt.formats.state.transposing import transposed
from ftckpt.transfer.content import Content, Copy, TargetTensor
from ftckpt.transfer.request.renaming import parameter_names, parted

from .sections import joined_sections, sections_of
from .shapes import Name
from .tables import OFFSETS, Family, TableEntry
from .views.experts import Stack, added, is_changed, stacked, unstacked
from .views.joins import Heads, part_rows, runs


class Naming(StrEnum):
    """Whose spelling."""

    MEGATRON = "megatron"
    HUGGING_FACE = "hugging face"


# The spellings that Megatron-core itself writes by default: Transformer Engine, expert by expert.
DEFAULT_SPELLINGS = ("megatron", "transformer_engine", "sequential")


class TableMatch(NamedTuple):
    """Where a table has a parameter's name.

    Attributes:
        entry: of which it is.
        part: which part of it; 0 for a whole.
        numbers: of its layer and its expert.
    """

    entry: TableEntry
    part: int
    numbers: Mapping[str, str]


class Translator:
    """Translates one family for one shape of attention."""

    def __init__(
        self,
        family: Family,
        heads: Heads,
        *,
        true_vocab_size: int | None = None,
        spellings: Sequence[str] = DEFAULT_SPELLINGS,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep what every tensor is translated by.

        Args:
            family: the table.
            heads: shape of attention, which no tensor's shape shows.
            true_vocab_size: rows of a vocabulary that are no padding; None keeps all.
            spellings: of Megatron's side, where its implementations differ.
            config: the model's `config.json`, for a family whose layers differ.

        Raises:
            UnsupportedError: the table has no rows of Megatron-core.
            UsageError: `config` does not say which layers are which.
        """
        if not family.entries:
            raise UnsupportedError(
                f"no table says how Megatron-core stores {family.name}", kind="unknown-rule"
            )
        self._layers: dict[str, frozenset[int]] = {}
        for text in {entry.layers for entry in family.entries if entry.layers}:
            if not config or family.shapes is None:
                raise UsageError(
                    f"layers of {family.name} differ, and nothing here says which is which",
                    hint=f"--config FILE: the {CONFIG} of the model",
                )
            self._layers[text] = family.shapes.layers(text, config)
        self._stacked = any(entry.stacked for entry in family.entries)
        if self._stacked and (not config or family.shapes is None):
            raise UsageError(
                f"nothing here says how many experts {family.name} has",
                hint=f"--config FILE: the {CONFIG} of the model",
            )
        self._config = config or {}
        self._family = family
        self._heads = heads
        self._rows = true_vocab_size
        self._spellings = spellings
        self._known: dict[tuple[str, Naming], TableMatch | None] = {}

    @property
    def _experts(self) -> int:
        """How many experts a layer has, whose table has them in one tensor; 0 where nothing says.

        Raises:
            UsageError: `config` does not say it.
        """
        if not self._stacked or self._family.shapes is None:
            return 0
        return self._family.shapes.amount("expert", self._config)

    def find(self, name: str, side: Naming) -> TableMatch | None:
        """Return what a parameter is in one side's spelling; None for what follows from elsewhere.

        Raises:
            UnsupportedError: the family has no such parameter (`unknown-rule`).
        """
        if (name, side) not in self._known:
            self._known[name, side] = self._find(name, side)
        return self._known[name, side]

    def _find(self, name: str, side: Naming) -> TableMatch | None:
        names = [name]
        if side is Naming.HUGGING_FACE:
            names.append(self._family.prefix + name)
        for spelled in names:
            found = self._match(spelled, side)
            if found is not None:
                return found
        if any(known.numbers(n) is not None for known in self._family.derived for n in names):
            return None
        raise UnsupportedError(
            f"{self._family.name} has no parameter that {side.title()} calls {name}",
            hint="--rename gives it another name first, --drop leaves it out",
            kind="unknown-rule",
            tensor=name,
        )

    def _match(self, name: str, side: Naming) -> TableMatch | None:
        for entry in self._family.entries:
            names: Sequence[Name] = entry.hf
            if side is Naming.MEGATRON:
                names = tuple(entry.megatron.values())
            for part, known in enumerate(names):
                numbers = known.numbers(name)
                if numbers is not None and self._is_of(entry, numbers):
                    return TableMatch(entry, part if side is Naming.HUGGING_FACE else 0, numbers)
        return None

    def _is_of(self, entry: TableEntry, numbers: Mapping[str, str]) -> bool:
        return not entry.layers or int(numbers.get("layer", "0")) in self._layers[entry.layers]

    def spellings(self, name: str) -> Iterator[list[str]]:
        """Yield how Megatron may call a tensor of Hugging Face's; of all experts in one, each."""
        entries = self._family.entries
        rows = [(e, n) for e in entries for k in e.hf if (n := k.numbers(name)) is not None]
        rows = [(entry, numbers) for entry, numbers in rows if self._is_of(entry, numbers)]
        stacked = any(entry.stacked for entry, _ in rows)
        for expert in range(self._experts) if stacked else [0]:
            yield [
                known.fill({**numbers, "expert": str(expert)} if entry.stacked else numbers)
                for entry, numbers in rows
                for known in entry.megatron.values()
            ]

    # --- to Hugging Face --------------------------------------------------------------------------

    def to_hugging_face(self, content: Content) -> Content:
        """Return the content under Hugging Face's names and in its shapes.

        Raises:
            UnsupportedError: a parameter that the family does not have, or that is not stored so
                that its axes can be exchanged.
            UsageError: a shape that does not fit the heads, fewer rows than the true vocabulary.
        """
        content = joined_sections(content, sections_of(self._family))
        content = self._offset(content, Naming.MEGATRON)
        parameters = parameter_names(content.tensors.values())
        turned: dict[str, TargetTensor] = {}
        made: dict[str, list[str]] = {}
        results: list[TargetTensor] = []
        wholes: dict[tuple[str, str, str], dict[int, TargetTensor]] = {}
        stacks: dict[tuple[str, str, str], TableEntry] = {}
        left_out: list[str] = []
        for key, wanted in content.tensors.items():
            if _is_foreign(wanted):
                results.append(wanted)
                continue
            parameter, rest = parted(wanted, parameters)
            found = self.find(parameter, Naming.MEGATRON)
            if found is None:
                left_out.append(key)
                continue
            if found.entry.stacked:
                name = found.entry.hf[0].fill(found.numbers) + rest
                whole = wanted.component, wanted.kind.value, name
                stacks[whole] = found.entry
                number = int(found.numbers["expert"])
                if number in wholes.setdefault(whole, {}):
                    raise UnsupportedError(
                        f"{key} and {wholes[whole][number].key} become one part of {name}",
                        tensor=key,
                    )
                wholes[whole][number] = wanted
                continue
            parts = list(self.parts(wanted, found.entry))
            for part_name, part in zip(found.entry.hf, parts, strict=True):
                new = part._replace(name=part_name.fill(found.numbers) + rest)
                if found.entry.transposed and len(new.shape) == 2:
                    turned[new.key] = new
                results.append(new)
                made.setdefault(key, []).append(new.key)
        counters = {w: next(iter(p.values())) for w, p in wholes.items() if _is_scalar_of(p)}
        results += [one._replace(name=whole[2]) for whole, one in counters.items()]
        content, more = stacked(
            content,
            {w: (stacks[w], parts) for w, parts in wholes.items() if w not in counters},
            self._experts if wholes else 0,
        )
        content = _renamed(content, [*results, *more], made, left_out)
        return transposed(content, turned)

    def _offset(self, content: Content, side: Naming) -> Content:
        """Return the content with the elements that the other side stores of them."""
        if not any(entry.stored for entry in self._family.entries):
            return content
        numbers = {}
        for key, wanted in content.tensors.items():
            if not _is_foreign(wanted) and is_changed(wanted):
                found = self.find(wanted.name, side)
                if found is not None and found.entry.stored:
                    number = OFFSETS[found.entry.stored]
                    numbers[key] = number if side is Naming.HUGGING_FACE else -number
        return added(content, numbers)

    def parts(self, wanted: TargetTensor, entry: TableEntry) -> Iterator[TargetTensor]:
        """Yield the parts of one tensor of Megatron's, still under its name."""
        count = len(entry.hf)
        if _is_scalar(wanted):
            yield from [wanted] * count
            return
        if entry.vocabulary and self._rows is not None:
            wanted = _first_rows(wanted, self._rows)
        sizes = self._sizes(wanted, entry)
        cut = list(runs(entry.join, count, wanted.shape[0], self._heads))
        for part, size in enumerate(sizes):
            copies = [
                copy
                for run in cut
                if run.part == part
                for copy in wanted.moved(_rows(wanted.shape, run.joined, run.rows), run.inside)
            ]
            yield wanted._replace(shape=(size, *wanted.shape[1:]), copies=tuple(copies))

    def _sizes(self, whole: TargetTensor, entry: TableEntry) -> list[int]:
        sizes = part_rows(entry.join, len(entry.hf), whole.shape[0], self._heads)
        if sizes is None:
            raise UsageError(
                f"{whole.key} of {list(whole.shape)} is not made of {entry.join} parts for "
                f"{self._heads.queries} heads in {self._heads.groups} groups of width "
                f"{self._heads.width}"
            )
        return sizes

    # --- to Megatron ------------------------------------------------------------------------------

    def to_megatron(self, content: Content) -> Content:
        """Return the content under Megatron-core's names and in its shapes.

        Raises:
            UnsupportedError: a parameter that the family does not have, or one without all its
                parts, or that is not stored so that its axes can be exchanged.
            UsageError: a shape that does not fit the heads, fewer rows than the true vocabulary.
        """
        content = self._offset(content, Naming.HUGGING_FACE)
        content = transposed(content, self._to_turn(content))
        parameters = parameter_names(content.tensors.values())
        content, experts = unstacked(content, self._stacks(content))
        wholes: dict[tuple[str, str, str], dict[int, TargetTensor]] = {}
        places: dict[tuple[str, str, str], TableMatch] = {}
        made: dict[str, list[str]] = {}
        left_out: list[str] = []
        others: list[TargetTensor] = []
        for key, wanted in content.tensors.items():
            if _is_foreign(wanted):
                others.append(wanted)
                continue
            parameter, rest = parted(wanted, parameters)
            found = self.find(parameter, Naming.HUGGING_FACE)
            if found is None:
                left_out.append(key)
                continue
            if key in experts:
                others += experts[key]
                made[key] = [one.key for one in experts[key]]
                continue
            if found.entry.stacked:  # a counter of all of them
                for number in range(self._experts):
                    name = self._spelled(found, number) + rest
                    others.append(wanted._replace(name=name))
                continue
            name = self._spelled(found) + rest
            whole = wanted.component, wanted.kind.value, name
            parts = wholes.setdefault(whole, {})
            if found.part in parts:
                raise UnsupportedError(
                    f"{key} and {parts[found.part].key} become one tensor, {name}", tensor=key
                )
            parts[found.part] = wanted
            places[whole] = found
            made[key] = [wanted._replace(name=name).key]
        results = [self._joined(w[2], parts, places[w]) for w, parts in wholes.items()]
        counters = sum(len(p) - 1 for p in wholes.values() if _is_scalar(next(iter(p.values()))))
        if counters:
            left_out.append(f"{counted(counters, 'counter')} of parts, equal to their first part's")
        return _renamed(content, [*results, *others], made, left_out)

    def _to_turn(self, content: Content) -> dict[str, TargetTensor]:
        parameters = parameter_names(content.tensors.values())
        turned = {}
        for key, wanted in content.tensors.items():
            if len(wanted.shape) == 2 and not _is_foreign(wanted):
                found = self.find(parted(wanted, parameters)[0], Naming.HUGGING_FACE)
                if found is not None and found.entry.transposed and not found.entry.stacked:
                    turned[key] = wanted
        return turned

    def _stacks(self, content: Content) -> Iterator[Stack]:
        """Yield the tensors that hold all experts of a layer."""
        parameters = parameter_names(content.tensors.values())
        for wanted in content.tensors.values():
            if _is_foreign(wanted) or _is_scalar(wanted):
                continue
            parameter, rest = parted(wanted, parameters)
            found = self.find(parameter, Naming.HUGGING_FACE)
            if found is not None and found.entry.stacked:
                numbers = range(self._experts)
                yield Stack(found.entry, wanted, [self._spelled(found, n) + rest for n in numbers])

    def _spelled(self, found: TableMatch, expert: int | None = None) -> str:
        spelled = found.entry.megatron
        numbers = found.numbers if expert is None else {**found.numbers, "expert": str(expert)}
        return next(spelled[key] for key in self._spellings if key in spelled).fill(numbers)

    def _joined(
        self, name: str, parts: Mapping[int, TargetTensor], place: TableMatch
    ) -> TargetTensor:
        """Return a tensor of Megatron's, made of all its parts."""
        entry = place.entry
        some = next(iter(parts.values()))
        absent = [k.fill(place.numbers) for n, k in enumerate(entry.hf) if n not in parts]
        if absent:
            raise UnsupportedError(
                f"{some.key} is a part of {name}, whose part {absent[0]} is not there",
                tensor=some.key,
            )
        ordered = [parts[n] for n in range(len(entry.hf))]
        if len({(part.dtype, part.shape[1:], len(part.shape)) for part in ordered}) > 1:
            raise UnsupportedError(
                f"the parts of {name} differ in type or shape, so that they make no one tensor",
                tensor=some.key,
            )
        if _is_scalar(some):
            return ordered[0]._replace(name=name)
        rows = sum(part.shape[0] for part in ordered)
        whole = some._replace(name=name, shape=(rows, *some.shape[1:]), copies=())
        if self._sizes(whole, entry) != [part.shape[0] for part in ordered]:
            raise UsageError(
                f"the parts of {name} have {', '.join(str(p.shape[0]) for p in ordered)} rows, "
                f"which are no {entry.join} parts of {rows}"
            )
        copies = [
            copy
            for run in runs(entry.join, len(ordered), rows, self._heads)
            for copy in ordered[run.part].moved(
                _rows(ordered[run.part].shape, run.inside, run.rows), run.joined
            )
        ]
        whole = whole._replace(copies=tuple(copies))
        if entry.vocabulary and self._rows is not None:
            whole = _first_rows(whole, self._rows)
        return whole


def _is_foreign(wanted: TargetTensor) -> bool:
    """Whether a tensor belongs to no parameter (RNG states): it is kept as it is."""
    return wanted.component.startswith("extra:")


def _is_scalar(wanted: TargetTensor) -> bool:
    """Whether a tensor counts something of its parameter and is not shaped like it."""
    return wanted.shape in ((), (1,)) and wanted.kind == "other"


def _is_scalar_of(parts: Mapping[int, TargetTensor]) -> bool:
    return _is_scalar(next(iter(parts.values())))


def _rows(shape: Sequence[int], begin: int, rows: int) -> Box:
    return Box((begin, *(0 for _ in shape[1:])), (rows, *shape[1:]))


def _first_rows(wanted: TargetTensor, rows: int) -> TargetTensor:
    if rows > wanted.shape[0]:
        raise UsageError(
            f"{wanted.key} has {wanted.shape[0]} rows, fewer than a vocabulary of {rows}"
        )
    copies: tuple[Copy, ...] = tuple(wanted.moved(_rows(wanted.shape, 0, rows), 0))
    return wanted._replace(shape=(rows, *wanted.shape[1:]), copies=copies)


def _renamed(
    content: Content,
    results: Sequence[TargetTensor],
    made: Mapping[str, Sequence[str]],
    left_out: Sequence[str],
) -> Content:
    """Return the content of `results`, with ties kept and what was left out said."""
    tensors: dict[str, TargetTensor] = {}
    for wanted in results:
        if wanted.key in tensors:
            raise UnsupportedError(
                f"two tensors of the source become {wanted.key}", tensor=wanted.key
            )
        tensors[wanted.key] = wanted
    aliases = {
        one: other
        for key, owner in content.aliases.items()
        for one, other in zip(made.get(key, ()), made.get(owner, ()), strict=False)
        if one != other
    }
    said: tuple[str, ...] = ()
    if left_out:
        said = (f"derived from the configuration: {listed(left_out, 3)}",)
    return replace(content, tensors=tensors, aliases=aliases, dropped=(*content.dropped, *said))
