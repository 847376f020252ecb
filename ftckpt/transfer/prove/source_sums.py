"""What a transfer reads of its source, summed up by place, so that nothing is read for the proof.

The bytes that are read come by here as they lie in the source's files. Where each belongs in a
tensor that is to be written follows from the source's own pieces and the content alone: what plans
the reading and puts elements in order (`transfer.read`) is not asked, and a fault in it, in a
writer or in the engine gives the result other sums.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Box, Checkpoint, Extent, Piece, TensorInfo
from ftckpt.checkpoint.coverage import intersection
from ftckpt.checkpoint.read_tensor import raw_dtype
from ftckpt.digests.place_sums import PlaceSum, has_rows, sum_in_box
from ftckpt.transfer.casting import Changes, cast, changes
from ftckpt.transfer.content import Content, Copy, TargetTensor
from ftckpt.verification.record_sums import TINY

if TYPE_CHECKING:
    from ftckpt.checkpoint.dtypes import DType
    from ftckpt.verification.seen import SeenBytes, SeenRuns


class _Part(NamedTuple):
    """Bytes of a stored piece that go to one box of one tensor.

    Attributes:
        number: of the tensor that is to be written.
        start, stop: in the piece's stored bytes.
        box: in that tensor.
        at: in the box's C order, the place of the first byte as it is written.
        before: the type of the stored elements, if another is written.
    """

    number: int
    start: int
    stop: int
    box: Box
    at: int
    before: DType | None


class _Place(NamedTuple):
    """A stored piece in its file, and where its bytes go."""

    start: int
    stop: int
    part: _Part


class SummedRun(NamedTuple):
    """Bytes of a file that one thread read in a row.

    Attributes:
        file: of the source.
        start, stop: which bytes.
        sums: what they add to each tensor, by its number.
        changes: what casts did to their values, by the same numbers.
    """

    file: str
    start: int
    stop: int
    sums: dict[int, PlaceSum]
    changes: dict[int, Changes]


class ReadForProof(NamedTuple):
    """What one thread, or a copy of this process, has read."""

    runs: list[SummedRun]
    seen: SeenRuns | None


class SourceSums:
    """Sums up what is read of a source, for its check and for the proof; by many threads.

    Args:
        content: what is to be written.
        seen: sums up the same for the check of the source.

    Attributes:
        sums: of the tensors of which every byte was read, by key; after `end`.
        changes: what casts did to the values of these.
    """

    def __init__(self, content: Content, seen: SeenBytes | None = None) -> None:
        self.seen = seen
        self.sums: Mapping[str, PlaceSum] = {}
        self.changes: Mapping[str, Changes] = {}
        self._targets = list(content.tensors.values())
        self._places: dict[str, list[_Place]] = defaultdict(list)
        self._expected: dict[int, int] = {}
        self._starts: dict[str, list[int]] = {}
        self._reach: dict[str, list[int]] = {}
        self._content = content
        self._thread = threading.local()
        self._runs: list[SummedRun] = []
        self._kept: dict[str, list[SummedRun]] = {}

    def begin(self) -> None:
        """Find where everything lies, which may read headers: best while reads go ahead.

        Raises:
            CorruptError, UnsafeError: a header cannot be trusted.
        """
        if self.seen is not None:
            self.seen.begin()
        index = _SourceIndex(self._content.checkpoint)
        for number, wanted in enumerate(self._targets):
            found = index.parts_of(number, wanted)
            if found is None:
                continue
            self._expected[number] = sum(
                wanted.dtype.nbytes(copy.box.volume) for copy in wanted.copies
            )
            for extent, part in found:
                self._places[extent.file].append(_Place(extent.offset, extent.end, part))
        self._sort()

    def saw(self, file: str, offset: int, data: memoryview) -> None:
        """Sum up bytes of a file that were just read."""
        if self.seen is not None:
            self.seen.saw(file, offset, data)
        places = self._places.get(file)
        if places is None:
            return
        end = offset + len(data)
        known = self._known(file, offset)
        if known:  # this thread has just read some of it
            offset, data = offset + known, data[known:]
            if offset >= end:
                return
        run = self._own(file, offset, end)
        number = bisect_left(self._starts[file], end) - 1
        reach = self._reach[file]
        while number >= 0 and reach[number] > offset:
            place = places[number]
            number -= 1
            if place.stop <= offset:
                continue
            part = place.part
            first = max(part.start, offset - place.start)
            last = min(part.stop, end - place.start)
            if first < last:
                found, more = self._sum(part, first, last, data, place.start - offset)
                run.sums[part.number] = run.sums.get(part.number, PlaceSum()).plus(found)
                if more.values:
                    run.changes[part.number] = run.changes.get(part.number, Changes()).plus(more)
        self._thread.runs[-1] = run._replace(stop=end)

    def undid(self, extent: Extent) -> None:
        """Hear that a compressed record was undone: its tensors are not summed up."""

    def drain(self) -> ReadForProof:
        """Return what this thread has summed up since it was asked last."""
        runs: list[SummedRun] = getattr(self._thread, "runs", [])
        self._thread.runs = []
        return ReadForProof(runs, None if self.seen is None else self.seen.drain())

    def take(self, read: ReadForProof) -> None:
        """Keep what a thread, or a copy of this process, has drained; by one thread alone."""
        self._runs += read.runs
        if self.seen is not None and read.seen is not None:
            self.seen.take(read.seen)

    def missing(self) -> list[Extent]:
        """Return what was not read of the tensors that are summed up, to be read now.

        Of bytes that several threads have read the sum of one counts.
        """
        self._keep()
        found = []
        for file, places in self._places.items():
            kept = self._kept.get(file, [])
            at = number = 0
            for place in places:  # sorted by their beginnings
                start = max(at, place.start)
                while start < place.stop:
                    while number < len(kept) and kept[number].stop <= start:
                        number += 1
                    run = kept[number] if number < len(kept) else None
                    if run is not None and run.start <= start:
                        start = run.stop
                        continue
                    stop = place.stop if run is None else min(place.stop, run.start)
                    found.append(Extent(file, start, stop - start))
                    start = stop
                at = max(at, place.stop)
        return found

    def end(self) -> None:
        """Say that all was read that is read, and taken."""
        self._keep()
        found = {number: PlaceSum() for number in self._expected}
        changed: dict[int, Changes] = {}
        for runs in self._kept.values():
            for run in runs:
                for number, more in run.sums.items():
                    found[number] = found[number].plus(more)
                for number, cast_there in run.changes.items():
                    changed[number] = changed.get(number, Changes()).plus(cast_there)
        whole = {n for n, made in found.items() if made.nbytes == self._expected[n]}
        self.sums = {self._targets[number].key: found[number] for number in whole}
        self.changes = {self._targets[n].key: changed[n] for n in whole & changed.keys()}
        self._kept = {}
        if self.seen is not None:
            self.seen.end()

    def _keep(self) -> None:
        """Choose among runs that overlap: the first and longest of them counts."""
        runs = self._runs + [run for some in self._kept.values() for run in some]
        runs.sort(key=lambda run: (run.file, run.start, -run.stop))
        self._runs, self._kept = [], defaultdict(list)
        for run in runs:
            kept = self._kept[run.file]
            if not kept or kept[-1].stop <= run.start:
                kept.append(run)

    def _sort(self) -> None:
        for file, places in self._places.items():
            places.sort(key=lambda place: (place.start, place.stop))
            self._starts[file] = [place.start for place in places]
            reach, most = [], 0
            for place in places:
                most = max(most, place.stop)
                reach.append(most)
            self._reach[file] = reach

    def _own(self, file: str, offset: int, end: int) -> SummedRun:
        """Return this thread's run that these bytes continue, or a new one."""
        runs: list[SummedRun] | None = getattr(self._thread, "runs", None)
        if runs is None:
            runs = self._thread.runs = []
        last = runs[-1] if runs else None
        follows = last is not None and (last.file, last.stop) == (file, offset)
        if last is None or not follows or last.stop - last.start <= TINY:
            last = SummedRun(file, offset, end, {}, {})
            runs.append(last)
        return last

    def _known(self, file: str, offset: int) -> int:
        """Return how many bytes from a place on are in this thread's last run."""
        runs: list[SummedRun] = getattr(self._thread, "runs", [])
        last = runs[-1] if runs else None
        if last is None or last.file != file or not last.start <= offset:
            return 0
        return max(0, last.stop - offset) if last.stop - last.start > TINY else 0

    def _sum(
        self, part: _Part, first: int, last: int, data: memoryview, begin: int
    ) -> tuple[PlaceSum, Changes]:
        """Sum up bytes `first` to `last` of a piece, whose first byte is at `begin` of `data`."""
        wanted = self._targets[part.number]
        shape, item = wanted.shape, wanted.dtype.itemsize
        if part.before is None:
            at = part.at + first - part.start
            view = data[begin + first : begin + last]
            return sum_in_box(shape, item, part.box, at, view), Changes()
        import numpy as np

        size = part.before.itemsize  # of elements that are cut here nothing is known
        first += -(first - part.start) % size
        last -= (last - part.start) % size
        if first >= last:
            return PlaceSum(), Changes()
        view = data[begin + first : begin + last]
        items = np.ndarray((len(view) // size,), raw_dtype(size), view)
        done = cast(items, part.before, wanted.dtype)
        at = part.at + (first - part.start) // size * item
        found = sum_in_box(shape, item, part.box, at, done.view(np.uint8).data)
        return found, changes(items, part.before, done, wanted.dtype)


class _SourceIndex:
    """Finds where a source's bytes go in the tensors of a content."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._known: dict[str, list[tuple[Piece, Extent]] | None] = {}

    def parts_of(self, number: int, wanted: TargetTensor) -> list[tuple[Extent, _Part]] | None:
        """Return the stored pieces that fill a tensor, with what each gives; None if not plain."""
        if not wanted.dtype.itemsize:
            return None
        found: list[tuple[Extent, _Part]] = []
        for copy in wanted.copies:
            if not copy.box.volume:
                continue
            info = self._checkpoint.tensors[copy.key]
            stored = self._stored(info)
            if stored is None:
                return None
            for piece, extent in stored:
                shared = intersection(piece.box, copy.source) if piece.box.sizes else piece.box
                if shared is None or not shared.volume:
                    continue
                part = _part(number, wanted, info.dtype, copy, piece, shared)
                if part is None:
                    return None
                if part.start < part.stop:
                    found.append((extent, part))
        return found

    def _stored(self, info: TensorInfo) -> list[tuple[Piece, Extent]] | None:
        """Return the main pieces of a tensor with their bytes; None where one is not stored so."""
        if info.key in self._known:
            return self._known[info.key]
        found: list[tuple[Piece, Extent]] | None = []
        for piece in info.pieces if info.dtype.itemsize else ():
            if piece.replica or not piece.box.volume:
                continue
            payload = self._checkpoint.payload(piece)
            start, stop = piece.flat or (0, piece.box.volume)
            nbytes = (stop - start) * info.dtype.itemsize
            plain = not payload.transforms and payload.strides is None
            if found is None or not plain or payload.extent.length < nbytes:
                found = None
                break
            found.append((piece, payload.extent._replace(length=nbytes)))
        self._known[info.key] = found if info.dtype.itemsize else None
        return self._known[info.key]


def _part(
    number: int, wanted: TargetTensor, before: DType, copy: Copy, piece: Piece, shared: Box
) -> _Part | None:
    """Return which bytes of a piece are a box of a tensor; None where they do not lie in a row.

    Args:
        number: of the tensor.
        wanted: the tensor.
        before: the type of the stored elements.
        copy: by which the tensor gets them.
        piece: holds them.
        shared: what the piece and the copy have in common, in the source's tensor.
    """
    moved = zip(copy.box.offsets, copy.source.offsets, shared.offsets, strict=True)
    box = Box(tuple(to + here - start for to, start, here in moved), shared.sizes)
    if not has_rows(wanted.shape, wanted.dtype.itemsize, box):
        return None
    low, high = 0, piece.box.volume
    if shared != piece.box:
        cut = [a for a, size in enumerate(shared.sizes) if size != piece.box.sizes[a]]
        if len(cut) != 1 or prod(piece.box.sizes[: cut[0]]) != 1:
            return None
        inner = prod(piece.box.sizes[cut[0] + 1 :])
        low = (shared.offsets[cut[0]] - piece.box.offsets[cut[0]]) * inner
        high = low + shared.sizes[cut[0]] * inner
    start, stop = piece.flat or (0, piece.box.volume)
    first, last = max(low, start), max(low, start, min(high, stop))
    size = before.itemsize
    return _Part(
        number, (first - start) * size, (last - start) * size, box,
        (first - low) * wanted.dtype.itemsize, None if before == wanted.dtype else before,
    )  # fmt: skip
