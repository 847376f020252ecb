"""Elements on their way from a file into a shard, clipped and cut without looking at boxes again.

What a piece holds of a shard is one regular pattern on both sides: an `ElementMove`. It is found
once, and any run of the shard's elements is a few moves of the same kind, by arithmetic alone.

Turn runs of elements in C order into boxes, and boxes into strided bytes of a file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Box, Payload, Piece
from ftckpt.checkpoint.dtypes import DType
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


class ElementMove(NamedTuple):
    """Elements that lie at a regular place in a file, and where they go in a shard.

    Axes of one element are left out, and those that both sides hold as one with the next.

    Attributes:
        held: the file, or the stream to undo first.
        offset: of the first element's first byte.
        span: bytes of the file from there to the end of the last element.
        start: index of the first element in the shard's C order.
        stop: one more than the index of the last.
        sizes: how many elements along each axis.
        strides: bytes of the file between neighbours along each axis.
        steps: elements of the shard between neighbours along each axis; each at least as many as
            all of the next axis take.
        dtype: what they are in the file.
    """

    held: StoredBox
    offset: int
    span: int
    start: int
    stop: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    steps: tuple[int, ...]
    dtype: DType

    @property
    def is_run(self) -> bool:
        """Whether the elements lie one after the other on both sides."""
        axes = len(self.sizes)
        return not axes or (
            axes == 1 and self.steps[0] == 1 and self.strides[0] == self.dtype.itemsize
        )

    def within(self, start: int, stop: int) -> list[ElementMove]:
        """Return the elements that go to `start` or later and before `stop`, in order."""
        if start <= self.start and self.stop <= stop:
            return [self]
        if not self.sizes:
            return []
        first, last, step = start - self.start, stop - self.start, self.steps[0]
        row = self.stop - self.start - (self.sizes[0] - 1) * step
        # Of the rows that are met, those before `whole` and from `cut` on are met in part.
        met, end = max(0, (first - row) // step + 1), min(self.sizes[0], -(-last // step))
        whole = max(met, -(-first // step))
        cut = max(whole, min(end, (last - row) // step + 1))
        found: list[ElementMove] = []
        for number in range(met, min(whole, end)):
            found += self.part(number, number + 1).within(start, stop)
        if whole < cut:
            found.append(self.part(whole, cut))
        for number in range(cut, end):
            found += self.part(number, number + 1).within(start, stop)
        return found

    def part(self, first: int, last: int, axis: int = 0) -> ElementMove:
        """Return the elements `first` to `last` along an axis."""
        held, offset, span, start, stop, sizes, strides, steps, dtype = self
        step, stride, fewer = steps[axis], strides[axis], sizes[axis] - (last - first)
        offset, span = offset + first * stride, span - fewer * stride
        start, stop = start + first * step, stop + (first - fewer) * step
        head, tail = slice(axis), slice(axis + 1, None)
        if last - first > 1:
            sizes = (*sizes[head], last - first, *sizes[tail])
            return ElementMove(held, offset, span, start, stop, sizes, strides, steps, dtype)
        sizes, strides, steps = ((*kept[head], *kept[tail]) for kept in (sizes, strides, steps))
        return ElementMove(held, offset, span, start, stop, sizes, strides, steps, dtype)

    def cut(self, most: int, gap: int) -> list[ElementMove]:
        """Cut what spans more than `most` bytes, or has rows more than `gap` bytes apart."""
        if not self.sizes or (self.span <= most and self.is_run):
            return [self]
        axis = self.strides.index(max(self.strides))  # not the first where a matrix is transposed
        count, stride = self.sizes[axis], self.strides[axis]
        if count * stride - self.span > gap:
            rows = 1  # what lies between two rows is not worth reading
        elif self.span > most:
            rows = max(1, min(most // stride, count // 2))
        else:
            return [self]
        cut: list[ElementMove] = []
        for row in range(0, count, rows):
            cut += self.part(row, min(row + rows, count), axis).cut(most, gap)
        return cut


def meeting(
    held: StoredBox, box: Box, start: int, steps: Sequence[int], dtype: DType
) -> ElementMove | None:
    """Return how the elements of a box of a tensor move that one place holds; None without any.

    Args:
        held: a place that holds elements of the tensor.
        box: in the tensor.
        start: index in the shard of the box's first element.
        steps: elements of the shard between neighbours along each axis of the box.
        dtype: of the tensor.
    """
    offset, span, reach = held.origin, dtype.itemsize, 1
    sizes: list[int] = []
    strides: list[int] = []
    kept: list[int] = []
    for wanted, size, has, held_size, stride, step in zip(
        *box, *held.box, held.strides, steps, strict=True
    ):
        first = max(wanted, has)
        count = min(wanted + size, has + held_size) - first
        if count <= 0:
            return None
        offset += (first - has) * stride
        start += (first - wanted) * step
        if count == 1:
            continue
        span += (count - 1) * stride
        reach += (count - 1) * step
        if sizes and strides[-1] == count * stride and kept[-1] == count * step:
            sizes[-1] *= count
            strides[-1], kept[-1] = stride, step
        else:
            sizes.append(count)
            strides.append(stride)
            kept.append(step)
    stop = start + reach
    return ElementMove(
        held, offset, span, start, stop, tuple(sizes), tuple(strides), tuple(kept), dtype
    )


class PlannedRead(NamedTuple):
    """Bytes that are read at once, and what is taken from them.

    Attributes:
        held: the file, or the stream to undo first.
        offset: of the first byte.
        nbytes: how many.
        moves: what they hold.
    """

    held: StoredBox
    offset: int
    nbytes: int
    moves: Sequence[ElementMove]


def readings(
    moves: Iterable[ElementMove], start: int, stop: int, *, most: int, gap: int
) -> Iterator[PlannedRead]:
    """Yield what to read for elements `start` to `stop` of a shard.

    Args:
        moves: all that fill them, and perhaps others.
        start: the first element.
        stop: one more than the last.
        most: bytes that are read at once.
        gap: reads closer than this many bytes become one.
    """
    for move in moves:
        if stop <= move.start or move.stop <= start:
            continue
        joined: list[ElementMove] = []
        begin = end = 0
        for part in move.within(start, stop):
            for one in part.cut(most, gap):
                last = one.offset + one.span
                if joined and 0 <= one.offset - end <= gap and last - begin <= most:
                    joined.append(one)
                    end = last
                    continue
                if joined:
                    yield PlannedRead(move.held, begin, end - begin, joined)
                joined, begin, end = [one], one.offset, last
        if joined:
            yield PlannedRead(move.held, begin, end - begin, joined)
