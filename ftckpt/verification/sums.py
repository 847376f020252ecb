"""The work of a CRC check: read ranges of one file and compute their CRCs."""

from __future__ import annotations

from typing import NamedTuple

from ftckpt.checkpoint import Extent
from ftckpt.digests.crc import checksum
from ftckpt.errors import FtckptError
from ftckpt.storage.chunks import LOCAL, chunks, size_for
from ftckpt.storage.decompress import open_stream, short
from ftckpt.storage.store import Opens
from ftckpt.workers.buffers import buffer
from ftckpt.workers.limits import RateLimit

PART = 64 << 20  # larger records are summed in parts, by several threads
SPAN = 4 << 20  # smaller ones are read together, up to this many bytes


class Range(NamedTuple):
    """A run of bytes to sum.

    Attributes:
        key: the caller's number for the sum.
        offset: first byte, in the file or in the decoded stream.
        length: number of bytes.
    """

    key: int
    offset: int
    length: int


class Spans(NamedTuple):
    """Ranges of one file: a task of the engine.

    Attributes:
        store: opens the file.
        path: of the file in `store`.
        file: its name in the checkpoint.
        ranges: sorted; either one of up to `PART` bytes, or several within `SPAN` bytes.
        limiter: bounds the rate of reading.
    """

    store: Opens
    path: str
    file: str
    ranges: tuple[Range, ...]
    limiter: RateLimit | None = None


class RecordStream(NamedTuple):
    """A transformed record: a task of the engine.

    Attributes:
        store: opens the file.
        path: of the file in `store`.
        extent: the stored bytes; its file is the name in the checkpoint.
        transforms: to undo.
        ranges: in the decoded stream.
        limiter: bounds the rate of reading.
    """

    store: Opens
    path: str
    extent: Extent
    transforms: tuple[str, ...]
    ranges: tuple[Range, ...]
    limiter: RateLimit | None = None


class Sums(NamedTuple):
    """CRC-32 of each range, or an error.

    Attributes:
        crcs: one per range of the task; empty after an error.
        nbytes: bytes of the file that were read.
        error: the failure.
    """

    task: Spans | RecordStream
    crcs: tuple[int, ...]
    nbytes: int
    error: FtckptError | None = None


def sum_or_fail(task: Spans | RecordStream) -> Sums:
    """Sum every range of the task; a failure is a result too."""
    try:
        if isinstance(task, RecordStream):
            return Sums(task, _sum_stream(task), task.extent.length)
        return _sum_spans(task)
    except FtckptError as error:
        return Sums(task, (), 0, error)


def _sum_spans(task: Spans) -> Sums:
    crc32 = checksum()
    first, last = task.ranges[0], task.ranges[-1]
    with task.store.open(task.path) as reader:
        if len(task.ranges) == 1:
            crc = 0
            size = size_for(task.store)
            for view in chunks(reader, first.offset, first.length, size=size, limiter=task.limiter):
                crc = crc32(view, crc)
            return Sums(task, (crc,), first.length)
        length = last.offset + last.length - first.offset
        view = buffer(length)
        if task.limiter is not None:
            task.limiter.take(length)
        reader.readinto(first.offset, view)
    starts = [(r.offset - first.offset, r.length) for r in task.ranges]
    return Sums(task, tuple(crc32(view[at : at + n], 0) for at, n in starts), length)


def _sum_stream(task: RecordStream) -> tuple[int, ...]:
    crc32 = checksum()
    order = sorted(range(len(task.ranges)), key=lambda i: task.ranges[i].offset)
    crcs = [0] * len(task.ranges)
    need = max((r.offset + r.length for r in task.ranges), default=0)
    position = 0
    done = 0  # ranges of `order` that lie wholly before `position`
    with task.store.open(task.path) as reader:
        for part in open_stream(
            reader, task.extent, task.transforms, limit=need, limiter=task.limiter, size=LOCAL
        ):
            view, end = memoryview(part), position + len(part)
            for i in order[done:]:
                _, offset, length = task.ranges[i]
                if offset >= end:
                    break
                inside = view[max(0, offset - position) : max(0, offset + length - position)]
                crcs[i] = crc32(inside, crcs[i])
            while done < len(order) and sum(task.ranges[order[done]][1:]) <= end:
                done += 1
            position = end
    if position < need:
        raise short(task.extent, need, position)
    return tuple(crcs)
