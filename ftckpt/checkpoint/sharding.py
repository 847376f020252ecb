"""Compute which part of a tensor each rank owns: geometry without names.

A tensor is cut along one axis into equal parts, or not at all. If an axis packs several sub-blocks
(gate and up of a gated MLP; z, x, B, C, dt of a state-space layer), each sub-block is cut on its
own and a part holds its share of each, one after the other:

    axis of 8 = [gate 0..3 | up 0..3], 2 parts    part 0 = gate 0..1, up 0..1
                                                  part 1 = gate 2..3, up 2..3

A plain concatenation of such parts has the right shape and the wrong rows, so the rule of the cut
must be known and is never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ftckpt.errors import UsageError
from ftckpt.extents import Box


class Split(NamedTuple):
    """How a tensor is cut over the parts of one group of ranks.

    Attributes:
        axis: the axis that is cut, or None if every part holds all of it.
        blocks: relative sizes of the sub-blocks that the axis packs; () for one block.
    """

    axis: int | None = None
    blocks: tuple[int, ...] = ()


REPLICATED = Split()
COLUMN = Split(0)  # weights are [out, in]: the outputs are divided
ROW = Split(1)
GATED = Split(0, (1, 1))


class Slab(NamedTuple):
    """A box of a global tensor, and its place in one part's own tensor; equal sizes."""

    box: Box
    local: Box


def slabs(shape: Sequence[int], split: Split, parts: int, part: int) -> tuple[Slab, ...]:
    """Return the content of part `part` of `parts` of a tensor of global `shape`.

    The slabs are in the order of the part's own tensor and tile it.

    Raises:
        UsageError: the axis does not exist, or cannot be divided evenly.
    """
    if split.axis is None or parts == 1:
        return (Slab(Box.whole(shape), Box.whole(shape)),)
    return _slabs(tuple(shape), split, parts, part)


# The layers of a model have a few shapes, and state has those of the weights.
@lru_cache(maxsize=1024)
def _slabs(shape: tuple[int, ...], split: Split, parts: int, part: int) -> tuple[Slab, ...]:
    assert split.axis is not None
    found, inside = [], 0
    for begin, size in _blocks(shape, split, parts):
        share = size // parts
        found.append(
            Slab(
                _along(shape, split.axis, begin + part * share, share),
                _along(shape, split.axis, inside, share),
            )
        )
        inside += share
    return tuple(found)


def part_shape(shape: Sequence[int], split: Split, parts: int) -> tuple[int, ...]:
    """Return the shape of one part of a tensor of global `shape`.

    Raises:
        UsageError: the axis does not exist, or cannot be divided evenly.
    """
    if split.axis is None or parts == 1:
        return tuple(shape)
    size = sum(size // parts for _, size in _blocks(shape, split, parts))
    return (*shape[: split.axis], size, *shape[split.axis + 1 :])


def global_shape(local: Sequence[int], split: Split, parts: int) -> tuple[int, ...]:
    """Return the shape of the tensor of which `local` is one of `parts` equal parts.

    Raises:
        UsageError: the axis does not exist.
    """
    if split.axis is None or parts == 1:
        return tuple(local)
    _require_axis(local, split.axis)
    return (*local[: split.axis], local[split.axis] * parts, *local[split.axis + 1 :])


def even_rows(length: int, parts: int, part: int) -> tuple[int, int]:
    """Return [start, stop) of a part in the chunked division of torch: ceil-sized, last ones short.

    This is how `torch.chunk` and DTensor's `Shard` divide; a part can be empty.
    """
    share = -(-length // parts)
    return min(part * share, length), min((part + 1) * share, length)


def _blocks(shape: Sequence[int], split: Split, parts: int) -> list[tuple[int, int]]:
    """Return (begin, size) of every sub-block along the axis, each divisible by `parts`."""
    assert split.axis is not None
    _require_axis(shape, split.axis)
    length = shape[split.axis]
    weights = split.blocks or (1,)
    unit, rest = divmod(length, sum(weights))
    if rest:
        raise UsageError(
            f"axis {split.axis} of {list(shape)} is not made of sub-blocks in the proportion "
            f"{':'.join(map(str, weights))}"
        )
    found, begin = [], 0
    for weight in weights:
        size = unit * weight
        if size % parts:
            what = f"a sub-block of {size}" if split.blocks else str(size)
            raise UsageError(
                f"axis {split.axis} of {list(shape)} cannot be divided: {what} rows over {parts}"
            )
        found.append((begin, size))
        begin += size
    return found


def _require_axis(shape: Sequence[int], axis: int) -> None:
    if not 0 <= axis < len(shape):
        raise UsageError(f"a tensor of shape {list(shape)} has no axis {axis} to divide")


def _along(shape: Sequence[int], axis: int, begin: int, size: int) -> Box:
    """Return the box of all of `shape` except that one axis has only `size` rows from `begin`."""
    offsets = tuple(begin if d == axis else 0 for d in range(len(shape)))
    sizes = tuple(size if d == axis else n for d, n in enumerate(shape))
    return Box(offsets, sizes)
