"""Turn runs of elements in C order into boxes, and boxes into strided bytes of a file."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Box, Payload, Piece
from ftckpt.checkpoint.read_tensor import dense_strides


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that hold elements `start` to `stop` of a C-ordered tensor, in order.

    Each box is one run of the order: its last axes are whole, those before its first partial axis
    have size one. A range of a tensor of n axes gives at most 2n - 1 boxes.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    if row == 0:
        return
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _below(first, boxes_of_range(shape[1:], head, tail))
        return
    if head:
        yield from _below(first, boxes_of_range(shape[1:], head, row))
        first += 1
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if tail:
        yield from _below(last, boxes_of_range(shape[1:], 0, tail))


def whole_rows(shape: Sequence[int], most: int) -> int:
    """Return how many elements, at most `most`, are some whole rows of a C-ordered tensor.

    The rows are the longest that fit. Such steps end where rows end, and need fewest boxes.
    """
    row = 1
    for size in reversed(shape):
        if not 0 < row * size <= most:
            break
        row *= size
    return most // row * row


def _below(index: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((index, *box.offsets), (1, *box.sizes))


class StoredBox(NamedTuple):
    """A box of a tensor, and where one place in storage holds its elements.

    Attributes:
        box: in the tensor.
        file: the file, or "" where `undone` has the bytes.
        origin: byte offset of the box's first element.
        strides: bytes between neighbours along each axis.
        undone: the payload whose transforms must be undone first; offsets are then in its stream.
    """

    box: Box
    file: str
    origin: int
    strides: tuple[int, ...]
    undone: Payload | None = None


class Boxes(NamedTuple):
    """Boxes of one tensor, and how to find those that a box may meet without looking at all.

    Attributes:
        axis: along which they lie one after the other.
        order: places of the boxes, by ascending offset along `axis`.
        starts: the offsets along `axis`, in that order.
        longest: the greatest size along `axis`.
    """

    axis: int
    order: tuple[int, ...]
    starts: tuple[int, ...]
    longest: int

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> Boxes:
        """Index some boxes, of which there is at least one, of a tensor that has an axis."""
        axes = range(len(boxes[0].sizes))
        axis = max(axes, key=lambda d: len({box.offsets[d] for box in boxes}))
        order = sorted(range(len(boxes)), key=lambda n: boxes[n].offsets[axis])
        starts = tuple(boxes[n].offsets[axis] for n in order)
        return cls(axis, tuple(order), starts, max(box.sizes[axis] for box in boxes))

    def near(self, box: Box) -> tuple[int, ...]:
        """Return the places of all boxes that share elements with `box`, and perhaps of others."""
        start = box.offsets[self.axis]
        first = bisect_right(self.starts, start - self.longest)
        return self.order[first : bisect_left(self.starts, start + box.sizes[self.axis])]


def held_by(piece: Piece, payload: Payload, itemsize: int) -> Iterator[StoredBox]:
    """Yield the boxes of a tensor that a piece of some volume holds, each at a regular place.

    A flat range of a box is a few boxes, whose elements lie one after the other.
    """
    undone = payload if payload.transforms else None
    base = payload.extent.offset
    if undone is not None:
        assert payload.inner is not None
        base = payload.inner[0]
    sizes = piece.box.sizes
    strides = _in_bytes(payload.strides or sizes, itemsize, dense=not payload.strides)
    file = "" if undone else payload.extent.file
    if piece.flat is None:
        yield StoredBox(piece.box, file, base, strides, undone)
        return
    start, stop = piece.flat
    for part in boxes_of_range(sizes, start, stop):
        inside = sum(o * s for o, s in zip(part.offsets, strides, strict=True))
        box = Box(
            tuple(a + b for a, b in zip(piece.box.offsets, part.offsets, strict=True)), part.sizes
        )
        if box.volume:
            yield StoredBox(box, file, base + inside - start * itemsize, strides, undone)


@lru_cache(maxsize=1024)  # thousands of pieces have few shapes
def _in_bytes(given: tuple[int, ...], itemsize: int, *, dense: bool) -> tuple[int, ...]:
    """Return strides in bytes, given those in elements, or sizes of what is dense."""
    return tuple(s * itemsize for s in (dense_strides(given) if dense else given))


def reach(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Return how many bytes lie from the first element's first byte to the last one's end."""
    for size, stride in zip(sizes, strides, strict=True):
        itemsize += (size - 1) * stride
    return itemsize


def is_run(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Say whether a strided box is one dense run of bytes."""
    expected = itemsize
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
