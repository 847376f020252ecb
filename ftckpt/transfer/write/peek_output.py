"""Find where a source's tensors lie in a result that is being written.

A tensor of a delta may be decoded from others of it, which lie elsewhere in the files that are
written: decoded a second and a third time they would cost more than all the rest. What was written
of them a while ago is still in memory. Files are made in the order in which tensors need each
other, so that most of it is there by then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

from ftckpt.checkpoint import Box, Checkpoint
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.transfer.layout import Elements, Layout, OutputFile
from ftckpt.transfer.read.copies_plan import is_run

# Put bytes of a file of the result, as they are now, into a view; say whether there are any.
Peek = Callable[[str, int, memoryview], bool]


class _Run(NamedTuple):
    """Bytes `start` to `stop` of a tensor's dense C order, and where they are written."""

    start: int
    stop: int
    path: str
    offset: int


class Written:
    """Finds bytes of tensors in the files of a result.

    What it gives may be anything, as where nothing has been written yet: who asks must know.

    Args:
        layout: of the result.
        source: whose tensors they are.
        peek: reads what is there.
    """

    def __init__(self, layout: Layout, source: Checkpoint, peek: Peek) -> None:
        self._peek = peek
        self._runs: dict[str, list[_Run]] = {}
        wanted = {key for several in source.decoding.helpers().values() for key in several}
        # Of several copies the last is found, which is to be the one that is made first.
        for file in reversed(layout.files) if wanted else ():
            for key, run in _runs(file, source, wanted):
                self._runs.setdefault(key, []).append(run)
        for runs in self._runs.values():
            runs.sort(key=itemgetter(0, 1))  # stable: not by the names of files

    def look(self, key: str, offset: int, view: memoryview) -> bool:
        """Put the bytes of a tensor that begin at `offset` of its dense C order into `view`.

        Returns:
            Whether the result has a place for all of them, and could be read there.
        """
        runs = self._runs.get(key, ())
        done = 0
        while done < len(view):
            at = offset + done
            number = bisect_right(runs, at, key=lambda run: run.start) - 1
            run = runs[number] if number >= 0 else None
            if run is None or run.stop <= at:
                return False
            part = view[done : done + run.stop - at]
            if not self._peek(run.path, run.offset + at - run.start, part):
                return False
            done += len(part)
        return True


def in_order(layout: Layout, depths: Mapping[str, int]) -> Layout:
    """Return a layout whose files are in the order in which their tensors need each other.

    Args:
        layout: of the result.
        depths: of the source's tensors (`depths_of`).
    """
    if not depths:
        return layout
    files = sorted(layout.files, key=lambda file: depth_of(file, depths, 0, file.size))
    return replace(layout, files=files)


def depths_of(source: Checkpoint) -> Mapping[str, int]:
    """Return how long the way is from a tensor to one that needs no other, by key; never 0."""
    helpers = source.decoding.helpers()
    depths: dict[str, int] = {}
    for first in helpers:
        way = [first]
        while way:
            key = way[-1]
            unknown = [one for one in helpers[key] if one in helpers and one not in depths]
            if unknown:
                way += unknown
            else:
                depths[key] = 1 + max(depths.get(one, 0) for one in helpers[key])
                way.pop()
    return depths


def depth_of(file: OutputFile, depths: Mapping[str, int], start: int, stop: int) -> float:
    """Return the mean depth of the elements in bytes `start` to `stop` of a file."""
    offsets = file.offsets
    total = deep = 0
    for number in range(max(0, bisect_right(offsets, start) - 1), len(file.segments)):
        if offsets[number] >= stop:
            break
        segment = file.segments[number]
        if isinstance(segment, Elements) and segment.shard.fills:
            nbytes = min(stop, offsets[number + 1]) - max(start, offsets[number])
            total += nbytes
            deep += nbytes * depths.get(segment.shard.fills[0].key, 0)
    return deep / total if total else 0.0


def _runs(
    file: OutputFile, source: Checkpoint, wanted: Collection[str]
) -> Iterator[tuple[str, _Run]]:
    """Yield what a file holds of the tensors that are wanted."""
    for offset, segment in zip(file.offsets, file.segments, strict=False):
        if not isinstance(segment, Elements) or not segment.shard.dtype.itemsize:
            continue
        shard, size = segment.shard, segment.shard.dtype.itemsize
        for fill in shard.fills:
            if fill.key not in wanted:
                continue
            info = source.tensors[fill.key]
            here, there = _first(fill.local, shard.shape), _first(fill.source, info.shape)
            if here is None or there is None or info.dtype != shard.dtype:
                continue
            start, stop = max(here, segment.start), min(here + fill.local.volume, segment.stop)
            if start < stop:
                begin = (there + start - here) * size
                place = offset + (start - segment.start) * size
                yield fill.key, _Run(begin, begin + (stop - start) * size, file.path, place)


def _first(box: Box, shape: Sequence[int]) -> int | None:
    """Return the place of a box's first element, where its elements follow each other."""
    if box.sizes == shape:
        return 0
    strides = dense_strides(shape)
    if not is_run(box.sizes, strides, 1):
        return None
    return sum(place * stride for place, stride in zip(box.offsets, strides, strict=True))
