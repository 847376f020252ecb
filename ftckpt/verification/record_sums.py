"""The CRC-32s that a checkpoint's writer recorded, held to the bytes that other work reads.

Bytes are summed up as they are read, in whatever pieces that is: most records are read whole and in
order, and their sums are put together. A record that was read in part, or behind a compression, is
read once more by the check that `verify` makes.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, Record
from ftckpt.digests.crc import checksum, combine
from ftckpt.errors import FtckptError
from ftckpt.extents import Extent

_CHUNK = 2 << 20  # see `ftckpt.digests.crc`
# Bytes of a run that is not gone on with: an element that two blocks of a result share is read for
# both, and a run that began with it would overlap the one before.
TINY = 16


class ByteRun(NamedTuple):
    """Bytes of one record that were read in a row.

    Attributes:
        file: of the checkpoint.
        offset: of the first byte in the file.
        length: number of bytes; 0 where a compressed record that begins there was undone.
        crc: their CRC-32.
    """

    file: str
    offset: int
    length: int
    crc: int


class RecordIndex:
    """The records of one checkpoint by place; empty where its format has none.

    Args:
        checkpoint: opened.

    Attributes:
        records: by file, sorted by place. Of a checkpoint whose records cannot be listed to their
            end none are kept.
        error: why they could not.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        held: dict[str, list[Record]] = defaultdict(list)
        self.error: FtckptError | None = None
        try:
            for record in checkpoint.records():
                held[record.extent.file].append(record)
        except FtckptError as error:
            held.clear()  # damaged around the records
            self.error = error
        self.records: Mapping[str, Sequence[Record]] = {
            file: sorted(some, key=lambda record: record.extent) for file, some in held.items()
        }
        self.starts = {
            file: [record.extent.offset for record in some] for file, some in self.records.items()
        }


class ReadSums:
    """Sums up what is read of one checkpoint; may be told by many threads.

    Args:
        index: the records of that checkpoint.
    """

    def __init__(self, index: RecordIndex) -> None:
        self._index = index
        self._crc32 = checksum()
        self._thread = threading.local()
        self._runs: dict[str, list[ByteRun]] = defaultdict(list)

    def saw(self, file: str, offset: int, data: memoryview) -> None:
        """Sum up bytes of a file that were just read."""
        starts = self._index.starts.get(file)
        if starts is None:
            return
        records, end = self._index.records[file], offset + len(data)
        number = max(0, bisect_right(starts, offset) - 1)
        while number < len(records) and starts[number] < end:
            record = records[number]
            number += 1
            first, last = max(offset, record.extent.offset), min(end, record.extent.end)
            if first < last and record.crc32 is not None and not record.transforms:
                self._add(file, first, data[first - offset : last - offset])

    def undid(self, extent: Extent) -> None:
        """Note that a compressed record was undone for the elements in it."""
        if extent.file in self._index.starts:
            runs = self._own()
            run = ByteRun(extent.file, extent.offset, 0, 0)
            if not runs or runs[-1] != run:
                runs.append(run)

    def drain(self) -> list[ByteRun]:
        """Return what this thread has summed up since it was asked last."""
        runs = self._own()
        self._thread.runs = []
        return runs

    def take(self, runs: Iterable[ByteRun]) -> None:
        """Keep what a thread, or a copy of this process, has drained; by one thread alone."""
        for run in runs:
            self._runs[run.file].append(run)

    def doubtful(self) -> Iterator[tuple[Record, bool]]:
        """Yield the records of which bytes were read and that were not seen to be whole.

        With each, whether it was read to its end and its sum is another; of the rest it is unknown.
        """
        for file, runs in self._runs.items():
            runs.sort(key=lambda run: (run.offset, -run.length))
            records, starts = self._index.records[file], self._index.starts[file]
            inside: dict[int, list[ByteRun]] = defaultdict(list)
            for run in runs:
                inside[bisect_right(starts, run.offset) - 1].append(run)
            for number in sorted(inside):
                record = records[number]
                if record.transforms:
                    yield from ((one, False) for one in _beside(records, number))
                    continue
                found = _sum(record, inside[number])
                if found != record.crc32:
                    yield record, found is not None

    def whole(self) -> Iterator[tuple[Record, bool]]:
        """Yield the records that were read from end to end, and whether they are what they were."""
        for file, runs in self._runs.items():
            runs.sort(key=lambda run: (run.offset, -run.length))
            records, starts = self._index.records[file], self._index.starts[file]
            inside: dict[int, list[ByteRun]] = defaultdict(list)
            for run in runs:
                inside[bisect_right(starts, run.offset) - 1].append(run)
            for number, some in inside.items():
                record = records[number]
                found = None if record.transforms else _sum(record, some)
                if found is not None:
                    yield record, found == record.crc32

    def _own(self) -> list[ByteRun]:
        runs: list[ByteRun] | None = getattr(self._thread, "runs", None)
        if runs is None:
            runs = self._thread.runs = []
        return runs

    def _add(self, file: str, offset: int, data: memoryview) -> None:
        runs = self._own()
        last = runs[-1] if runs else None
        start, crc = offset, 0
        if last is not None and last.file == file and last.length > TINY:
            known = last.offset + last.length - offset
            if known > 0 and last.offset <= offset:  # this thread has just read some of it
                offset, data = offset + known, data[known:]
                start = offset
                if not data:
                    return
        goes_on = last is not None and last.length > TINY
        if (
            last is not None
            and goes_on
            and (last.file, last.offset + last.length) == (file, offset)
        ):
            starts = self._index.starts[file]
            at = bisect_left(starts, offset)
            if starts[at : at + 1] != [offset]:  # no record begins here: the same one goes on
                runs.pop()
                start, crc = last.offset, last.crc
        for at in range(0, len(data), _CHUNK):
            crc = self._crc32(data[at : at + _CHUNK], crc)
        runs.append(ByteRun(file, start, offset + len(data) - start, crc))


def _sum(record: Record, runs: Iterable[ByteRun]) -> int | None:
    """Return the CRC-32 of a record that was read whole, by sorted runs; None of any other."""
    at, crc = record.extent.offset, 0
    for run in runs:
        if run.offset > at:
            return None
        if run.offset == at:
            crc = combine(crc, run.crc, run.length) if at > record.extent.offset else run.crc
            at += run.length
    return crc if at == record.extent.end else None


def _beside(records: Sequence[Record], number: int) -> Iterator[Record]:
    """Yield the records that are compressed together with one, and the one."""
    extent = records[number].extent
    while number and records[number - 1].extent == extent:
        number -= 1
    while number < len(records) and records[number].extent == extent:
        if records[number].crc32 is not None:
            yield records[number]
        number += 1
