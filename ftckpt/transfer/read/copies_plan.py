"""Elements on their way from a file into a shard, clipped and cut without looking at boxes again.

What a piece holds of a shard is one regular pattern on both sides: an `ElementMove`. It is found
once, and any run of the shard's elements is a few moves of the same kind, by arithmetic alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.dtypes import DType

from .geometry import StoredBox


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
