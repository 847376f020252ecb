"""How ZeRO cuts parameters into flat partitions: arithmetic alone.

Stages 1 and 2 lay the parameters of a group one after the other, pad the end to a multiple of
2 * DP, and give each rank an equal run of it: a run ends anywhere in a parameter. Since 0.19.7 the
option `parameter_alignment` may leave gaps between parameters, which the file records.

    n = 10, DP = 4    padded 16, each rank 4    ranks hold 4, 4, 2 and 0 elements

Stage 3 cuts each parameter on its own into DP runs of ceil(n / DP), the last ones short or empty,
and lays a rank's runs one after the other, each at its full length.

    n = 10, DP = 4    run 3                     ranks hold 3, 3, 3 and 1 elements
    n = 2,  DP = 4    run 1                     ranks hold 1, 1, 0 and 0 elements

Recorded paddings are not used to find anything: BF16_Optimizer books all of it on the last rank,
even where that is more than the rank holds, and some states are stored with it and some without.

Sources: `runtime/zero/stage_1_and_2.py`, `runtime/bf16_optimizer.py`, `runtime/zero/stage3.py`,
`utils/zero_to_fp32.py` of DeepSpeed 0.19.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]

# Elements to which a partition of stages 1 and 2 is aligned (`nccl_start_alignment_factor`).
ALIGNMENT = 2


class FlatRun(NamedTuple):
    """A run of one parameter's elements and where it lies in a rank's flat tensor.

    Attributes:
        name: of the parameter.
        start: first element, in C order of the parameter.
        stop: one after its last.
        at: index of the first in the flat tensor.
    """

    name: str
    start: int
    stop: int
    at: int


def partition_size(total: int, ranks: int) -> int:
    """Return how many elements of a group of `total` each of `ranks` holds, padding included."""
    return -(-total // (ALIGNMENT * ranks)) * ALIGNMENT


class FlatGroup:
    """One parameter group of stages 1 and 2, laid out.

    Attributes:
        shapes: name -> shape, in the order in which they are laid out.
        ranks: number of partitions.
        total: elements with the gaps, without the padded end.
        size: elements of one partition, padding included.
    """

    def __init__(self, shapes: Mapping[str, Shape], ranks: int, gaps: Sequence[int] = ()) -> None:
        """Lay the parameters out.

        Args:
            shapes: as above.
            ranks: as above.
            gaps: elements after each parameter; () for none.
        """
        self.shapes, self.ranks = shapes, ranks
        self._names = list(shapes)
        lengths = [prod(shape) for shape in shapes.values()]
        steps = [n + gap for n, gap in zip(lengths, gaps or [0] * len(lengths), strict=True)]
        ends = list(accumulate(steps))
        self.total = ends[-1] if ends else 0
        self._starts = [end - step for end, step in zip(ends, steps, strict=True)]
        self._stops = [s + n for s, n in zip(self._starts, lengths, strict=True)]
        self.size = partition_size(self.total, ranks)

    def held(self, rank: int) -> int:
        """Return how many elements of a rank's partition are no padding at the end."""
        return min(max(self.total - rank * self.size, 0), self.size)

    def runs(self, rank: int) -> Iterator[FlatRun]:
        """Yield what one rank holds of the parameters, in order."""
        begin, end = rank * self.size, (rank + 1) * self.size
        for number in range(bisect_right(self._stops, begin), len(self._names)):
            offset = self._starts[number]
            if offset >= end:
                return
            start, stop = max(offset, begin), min(self._stops[number], end)
            if start < stop:
                yield FlatRun(self._names[number], start - offset, stop - offset, start - begin)


class SlicedGroup:
    """Parameters of stage 3, laid out one after the other in each rank's flat tensor.

    Attributes:
        shapes: name -> shape, in the order in which they are laid out.
        total: elements that each rank stores, padding included.
    """

    def __init__(self, shapes: Mapping[str, Shape], ranks: int | Mapping[str, int]) -> None:
        """Lay the parameters out.

        Args:
            shapes: as above.
            ranks: number of partitions, of all parameters or of each.
        """
        self.shapes = shapes
        self._names = list(shapes)
        self._lengths = [prod(shape) for shape in shapes.values()]
        counts = ranks.values() if isinstance(ranks, Mapping) else [ranks] * len(shapes)
        self._sizes = [-(-n // count) for n, count in zip(self._lengths, counts, strict=True)]
        ends = list(accumulate(self._sizes))
        self.total = ends[-1] if ends else 0
        self._starts = [end - size for end, size in zip(ends, self._sizes, strict=True)]

    def names(self, begin: int, end: int) -> list[str]:
        """Return the parameters that start at `begin` to `end` of a rank's flat tensor."""
        low, high = bisect_left(self._starts, begin), bisect_left(self._starts, end)
        return self._names[low:high]

    def runs(self, rank: int | Sequence[int], begin: int, end: int) -> Iterator[FlatRun]:
        """Yield what lies at `begin` to `end` of a rank's flat tensor, in order.

        The runs' places are counted from `begin`: that is where a sub-group's own tensor starts.

        Args:
            rank: which partition, of all parameters or of each.
            begin: first element.
            end: one after the last.
        """
        for number in range(max(bisect_right(self._starts, begin) - 1, 0), len(self._names)):
            at, size = self._starts[number], self._sizes[number]
            if at >= end:
                return
            first = (rank if isinstance(rank, int) else rank[number]) * size
            length = min(first + size, self._lengths[number]) - first
            low, high = max(at, begin), min(at + length, end)
            if low < high:
                start = first + low - at
                yield FlatRun(self._names[number], start, start + high - low, low - begin)
