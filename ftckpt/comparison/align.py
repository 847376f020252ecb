"""Pair the tensors of two checkpoints, and choose the elements to compare."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ftckpt.checkpoint import Box
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
    from .elements import has_values

    kinds = [w.dtype for w in (ours, theirs)]
    return all(map(has_values, kinds)) and len({d.family == "complex" for d in kinds}) == 1
