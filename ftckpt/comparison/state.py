"""Non-tensor state of two checkpoints, field by field: which fields differ, and what they mean.

Pair the tensors of two checkpoints, and choose the elements to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Kind
from ftckpt.checkpoint.dtypes import decode_scalar
from ftckpt.errors import FtckptError
from ftckpt.inspection.resume import spoken
from ftckpt.inspection.training_state import about as about
from ftckpt.transfer.content import Content, Shard, TargetTensor


class DiffStatus(StrEnum):
    """How one tensor, or one field of other state, of two checkpoints compares."""

    EQUAL = "equal"
    RECORDED = "recorded as equal"  # what is recorded of both says so; not read
    CLOSE = "close"  # other bits, within the tolerances
    DIFFERENT = "different"
    MISSING = "missing"  # only the first has it
    ADDED = "added"  # only the second has it
    OTHER_SHAPE = "other shape"
    OTHER_DTYPE = "other dtype"
    UNREAD = "unread"  # it could not be read, or not be compared


class Side(NamedTuple):
    """A tensor on one side.

    Attributes:
        second: whether it is of the second checkpoint.
        key: in that side's content.
        wanted: what it is.
    """

    second: bool
    key: str
    wanted: TargetTensor


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """One tensor, by the key that both give it.

    Attributes:
        key: what it is called.
        ours: in the first checkpoint; None where it has none.
        theirs: in the second.
        rows: of a vocabulary, how many are compared: the others are padding; None for all.
        status: where that is known without reading.
        tied: for a tensor that one side lacks, where the other stores it: the tensors of that side
            that it would be a copy of, were it tied.
    """

    key: str
    ours: Side | None
    theirs: Side | None
    rows: int | None = None
    status: DiffStatus | None = None
    tied: tuple[Side, ...] = ()

    @property
    def either(self) -> TargetTensor:
        """The tensor on the side that has it, the first where both do."""
        side = self.ours or self.theirs
        assert side is not None
        return side.wanted


@dataclass(frozen=True)
class Vocabulary:
    """What is known of the rows of a vocabulary.

    Attributes:
        is_vocabulary: says of a parameter's name whether its first axis is the vocabulary.
        true_rows: how many rows are no padding; None where nobody knows.
    """

    is_vocabulary: Callable[[str], bool] = lambda _: False
    true_rows: int | None = None

    def rows(self, ours: TargetTensor, theirs: TargetTensor) -> int | None:
        """Return how many rows of a tensor to compare; None where that is all of both."""
        rows, name = self.true_rows, ours.name
        if not ours.shape or ours.shape[1:] != theirs.shape[1:] or len(ours.shape) != len(
            theirs.shape
        ):  # fmt: skip
            return None
        fewer, more = sorted((ours.shape[0], theirs.shape[0]))
        if rows is None or rows > fewer or rows == more:
            return None
        return rows if self.is_vocabulary(name) or self.is_vocabulary(theirs.name) else None


def align(
    ours: Content, theirs: Content, keys: Container[str], vocabulary: Vocabulary, *, by_value: bool
) -> Iterator[ComparedPair]:  # fmt: skip
    """Yield every tensor of either, in the order of the first and then of the second.

    Args:
        ours: the first, under the names that are compared.
        theirs: the second.
        keys: of the tensors that are compared.
        vocabulary: what is known of padding.
        by_value: whether tensors of two types are compared.
    """
    first, second = _sides(ours, keys, False), _sides(theirs, keys, True)
    for key in first | second:
        one, two = first.get(key), second.get(key)
        if one is None or two is None:
            yield _lonely(key, one, two, ours if two is None else theirs,
                          second if two is None else first, vocabulary)  # fmt: skip
            continue
        rows = vocabulary.rows(one.wanted, two.wanted)
        status = None
        if rows is None and one.wanted.shape != two.wanted.shape:
            status = DiffStatus.OTHER_SHAPE
        elif one.wanted.dtype != two.wanted.dtype and not (
            by_value and _comparable(one.wanted, two.wanted)
        ):
            status = DiffStatus.OTHER_DTYPE
        yield ComparedPair(key, one, two, rows, status)


def shards(content: Content, side: Side, rows: int | None) -> Shard:
    """Return the elements of a tensor that are compared."""
    if rows is None:
        return content.whole(side.key)
    shape = side.wanted.shape
    return content.part(side.key, Box((0,) * len(shape), (rows, *shape[1:])))


def _sides(content: Content, keys: Container[str], second: bool) -> dict[str, Side]:
    sides = {
        key: Side(second, key, tensor) for key, tensor in content.tensors.items() if key in keys
    }
    for key, owner in content.aliases.items():
        tensor = content.tensors.get(owner)
        if key in keys and key not in content.tensors and tensor is not None:
            named = tensor._replace(name=key) if tensor.component == "model" else tensor
            sides[key] = Side(second, owner, named)
    return sides


def _lonely(
    key: str, one: Side | None, two: Side | None, content: Content, others: Mapping[str, Side],
    vocabulary: Vocabulary,
) -> ComparedPair:  # fmt: skip
    """Return the pair of a tensor that one side lacks, with what it may be a copy of."""
    side = one or two
    assert side is not None
    owner = content.aliases.get(key)
    if owner is not None and owner in others:
        return ComparedPair(key, one, two, status=DiffStatus.EQUAL)
    tied: tuple[Side, ...] = ()
    if vocabulary.is_vocabulary(side.wanted.name):
        form = side.wanted._replace(name="", copies=())
        tied = tuple(
            Side(side.second, other, tensor)
            for other, tensor in content.tensors.items()
            if other != key
            and other in others
            and tensor._replace(name="", copies=()) == form
            and vocabulary.is_vocabulary(tensor.name)
        )
    return ComparedPair(
        key, one, two, status=DiffStatus.MISSING if two is None else DiffStatus.ADDED, tied=tied
    )


def _comparable(ours: TargetTensor, theirs: TargetTensor) -> bool:
    from .arithmetic import has_values

    kinds = [w.dtype for w in (ours, theirs)]
    return all(map(has_values, kinds)) and len({d.family == "complex" for d in kinds}) == 1


class Field(NamedTuple):
    """One field of a checkpoint's non-tensor state.

    Attributes:
        name: path in the trainer's state, joined by dots, without the rank.
        rank: whose it is, where each rank has its own.
        shown: the value in a few words.
        digest: the same for equal values, and for no others.
    """

    name: str
    rank: int | None
    shown: str
    digest: bytes


Fields = Callable[[Checkpoint], Iterable[Field | FtckptError]]
"""Reads the non-tensor state of a checkpoint; what cannot be read is an answer too.

How state is stored is the formats' knowledge.
"""


class Follows(StrEnum):
    """How a field of other state hangs on the grid of ranks."""

    GRID = "grid"  # it says what the grid is, or which rank of it
    STORAGE = "storage"  # it says how the state is cut and stored, on any grid
    ACROSS = "across"  # it is another where the grid is another, and there alone


@dataclass(frozen=True, slots=True)
class StateDifference:
    """A field that differs.

    Attributes:
        name: of the field.
        about: which part of the training state it is: a key of the table of the resume check, or
            `learning-rate`, `settings`, `other`.
        title: the same for a person.
        rank: whose it is; None where every rank has the same.
        status: different, missing or added.
        a: the first value in a few words, None where there is none.
        b: the second.
        layout: whether it must differ, because the two lie on other grids of ranks, or are stored
            in another way.
    """

    name: str
    about: str
    title: str
    rank: int | None
    status: DiffStatus
    a: str | None
    b: str | None
    layout: bool = False


Hangs = Callable[[StateDifference], "Follows | None"]
"""Says how a field that differs hangs on the grid; names are the formats' knowledge."""


def mark_layout(
    differences: Iterable[StateDifference], hangs: Hangs, *, other_grid: bool
) -> list[StateDifference]:
    """Return the differences, with those marked that must differ between the two layouts.

    Args:
        differences: of `compare_fields`.
        hangs: how each hangs on the grid.
        other_grid: whether the two are known to lie on other grids; a field that says what the
            grid is shows it too.
    """
    known = [(one, hangs(one)) for one in differences]
    other_grid = other_grid or any(follows is Follows.GRID for _, follows in known)
    always = (Follows.GRID, Follows.STORAGE)
    return [
        replace(one, layout=follows in always or (other_grid and follows is Follows.ACROSS))
        for one, follows in known
    ]


_SMALL = 1 << 20  # a generator's state has a few thousand bytes


def state_tensors(content: Content) -> dict[str, str]:
    """Return the tensors that are compared as fields: key -> name of the field.

    They are counters, and states of generators: of neither means a norm anything.
    """
    found = {}
    for key, wanted in content.tensors.items():
        if wanted.kind is not Kind.OTHER or wanted.component in ("model", "ema"):
            continue
        name = spoken(key, content.checkpoint.tensors[wanted.copies[0].key])
        generator = wanted.dtype.name == "uint8" and about(name)[0].startswith("rng")
        if wanted.nbytes <= _SMALL and (generator or all(n == 1 for n in wanted.shape)):
            found[key] = name
    return found


def field_of(name: str, wanted: TargetTensor, data: bytes) -> Field:
    """Return a small tensor as a field.

    Args:
        name: what it is called.
        wanted: what it is.
        data: its elements.
    """
    import xxhash

    form = f"{wanted.dtype.name}{list(wanted.shape)}"
    digest: bytes = xxhash.xxh3_128_digest(form.encode() + data)
    one = len(data) == wanted.dtype.itemsize
    if one and wanted.dtype.family in ("int", "uint", "bool"):
        shown = str(int.from_bytes(data, "little", signed=wanted.dtype.family == "int"))
    else:
        number = decode_scalar(wanted.dtype, data) if one else None
        shown = repr(number) if number is not None else f"{form} #{digest.hex()[:8]}"
    return Field(name, None, shown, digest)


def compare_fields(ours: Iterable[Field], theirs: Iterable[Field]) -> Iterator[StateDifference]:
    """Yield the fields that differ.

    A field that every rank has with the same value counts as one field: the number of ranks does
    not make states differ.
    """
    first, second = _by_name(ours), _by_name(theirs)
    for name in first | second:
        one, two = first.get(name, {}), second.get(name, {})
        for rank in sorted(one.keys() | two.keys(), key=lambda r: -1 if r is None else r):
            a = one.get(rank, one.get(None))
            b = two.get(rank, two.get(None))
            if rank is None and ((one and a is None) or (two and b is None)):
                continue  # the other side has a value for each rank: they are compared one by one
            if a is None or b is None or a.digest != b.digest:
                yield _difference(name, rank, a, b)


def _difference(name: str, rank: int | None, a: Field | None, b: Field | None) -> StateDifference:
    status = DiffStatus.DIFFERENT
    if a is None or b is None:
        status = DiffStatus.MISSING if b is None else DiffStatus.ADDED
    shown = [None if field is None else field.shown for field in (a, b)]
    if a is not None and b is not None and a.shown == b.shown:
        # What is alike in a few words is told apart by what it is compared by.
        shown = [f"{field.shown} #{field.digest.hex()[:8]}" for field in (a, b)]
    key, title = about(name)
    return StateDifference(name, key, title, rank, status, shown[0], shown[1])


def _by_name(fields: Iterable[Field]) -> dict[str, dict[int | None, Field]]:
    found: dict[str, dict[int | None, Field]] = {}
    for field in fields:
        found.setdefault(field.name, {})[field.rank] = field
    return {
        name: {None: next(iter(held.values()))}
        if len({field.digest for field in held.values()}) == 1
        else held
        for name, held in found.items()
    }
