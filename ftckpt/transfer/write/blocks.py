"""Make one block of an output file: gather its bytes, sum them up, hash them, write them.

A block is 64 MiB, the unit of the manifest's digests, so a file's digests are made while it is
written. Blocks of a file may be made by several threads at once. Where a format stores a CRC-32
behind the data that it covers, the block with the checksum waits for the blocks with the data;
those were begun earlier, so the wait always ends.

Record finished blocks, one line each, so that a killed run can go on.

A line is written after the block's bytes. It may survive them (a power cut), so the bytes are
hashed again before a line is believed.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from ftckpt.checkpoint import Checkpoint
from ftckpt.digests.blocks import block_length
from ftckpt.digests.crc import Checksum, checksum, combine
from ftckpt.errors import FtckptError, UnsafeError
from ftckpt.extents import BLOCK
from ftckpt.own_files import FOLDER, own_path
from ftckpt.progress import NULL, Counter
from ftckpt.strict_json import decode
from ftckpt.transfer.layout import (
    Checksums,
    Elements,
    Layout,
    Literal,
    OutputFile,
    Segment,
    Stored,
    Zeros,
)
from ftckpt.transfer.places import place_of
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.workers.buffers import buffer

_CHUNK_SLOT = 3


class Sum(NamedTuple):
    """The CRC-32 of bytes `start` to `stop` of a file."""

    start: int
    stop: int
    crc32: int


class BlockMade(NamedTuple):
    """What making (or finding) one block gave.

    Attributes:
        file: path of the file.
        number: which block, from 0.
        digest: XXH3-128, 16 bytes.
        sums: of the parts of covered ranges that lie in the block, in order.
        note: what else the maker of the file wants to know when it takes it over.
    """

    file: str
    number: int
    digest: bytes
    sums: tuple[Sum, ...] = ()
    note: str = ""


class Sink(Protocol):
    """Where the bytes of one file go."""

    def write(self, offset: int, view: memoryview) -> None:
        """Keep the bytes at `offset`; `view` is used again afterwards."""


class CrcLedger:
    """The CRC-32s of one file's covered ranges, put together from what blocks report.

    Args:
        ranges: [start, stop) of the file; they do not overlap.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self.ranges: Sequence[tuple[int, int]] = sorted(r for r in set(ranges) if r[0] < r[1])
        self._starts = [start for start, _ in self.ranges]
        self._parts: dict[int, Sum] = {}
        self._changed = threading.Condition()
        self._failed: BaseException | None = None

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of covered ranges inside [start, stop), in order."""
        index = max(0, bisect_right(self._starts, start) - 1)
        while index < len(self.ranges) and self.ranges[index][0] < stop:
            begin, end = self.ranges[index]
            if max(begin, start) < min(end, stop):
                yield max(begin, start), min(end, stop)
            index += 1

    def add(self, part: Sum) -> None:
        """Take the sum of a part of a range; parts of one range meet at the same places always."""
        with self._changed:
            self._parts[part.start] = part
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Wake who waits: the sums will not come."""
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    def wait(self, start: int, stop: int) -> int:
        """Return the CRC-32 of a whole range when all its parts are there.

        Raises:
            BaseException: what kept another block from being made.
        """
        crc, at = 0, start
        with self._changed:
            while at < stop:
                part = self._parts.get(at)
                if part is None:
                    if self._failed is not None:
                        raise self._failed
                    self._changed.wait()
                    continue
                crc = part.crc32 if at == start else combine(crc, part.crc32, part.stop - at)
                at = part.stop
        return crc


class BlockMaker:
    """Makes the blocks of one output file.

    Args:
        file: its layout.
        gatherer: reads the source.
        counter: is told of every byte that is made.
    """

    def __init__(self, file: OutputFile, gatherer: Gatherer, counter: Counter = NULL) -> None:
        self.file = file
        self.ledger = CrcLedger(
            r for s in file.segments if isinstance(s, Checksums) for r in s.ranges
        )
        self._gatherer = gatherer
        self._counter = counter

    def make(self, number: int, sink: Sink) -> BlockMade:
        """Make one block and write it.

        Raises:
            FtckptError: the source could not be read, or the sink not written.
        """
        import xxhash

        try:
            state = xxhash.xxh3_128()
            running = RunningSums(self.ledger, checksum())
            begin = number * BLOCK
            end = begin + block_length(self.file.size, number)
            size = self._gatherer.chunk
            chunk = buffer(size, _CHUNK_SLOT)
            for start in range(begin, end, size):
                view = chunk[: min(size, end - start)]
                self._make_chunk(start, view, running)
                state.update(view)
                sink.write(start, view)
                self._counter.add(len(view))
            return BlockMade(self.file.path, number, state.digest(), running.finished())
        except BaseException as error:
            self.ledger.fail(error)
            raise

    def known(self, made: BlockMade) -> None:
        """Take over what an earlier run made, so that other blocks can rely on it."""
        for part in made.sums:
            self.ledger.add(part)

    def _make_chunk(self, start: int, view: memoryview, running: RunningSums) -> None:
        """Make bytes [start, start + len(view)) of the file."""
        offsets, segments = self.file.offsets, self.file.segments
        stop = start + len(view)
        index = bisect_right(offsets, start) - 1
        at = start
        while at < stop:
            segment, first = segments[index], offsets[index]
            end = min(offsets[index + 1], stop)
            if at < end:
                part = view[at - start : end - start]
                if isinstance(segment, Checksums):
                    running.publish()
                    crcs = [self.ledger.wait(*r) if r[0] < r[1] else 0 for r in segment.ranges]
                    part[:] = segment.build(crcs)[at - first : end - first]
                else:
                    self._fill(segment, at - first, part)
                running.take(at, part)
                at = end
            index += 1

    def _fill(self, segment: Segment, skip: int, view: memoryview) -> None:
        """Put bytes `skip` and on of a segment into `view`."""
        if isinstance(segment, Literal):
            view[:] = memoryview(segment.data)[skip : skip + len(view)]
        elif isinstance(segment, Zeros):
            view[:] = bytes(len(view))
        elif isinstance(segment, Stored):
            file, offset, _ = segment.extent
            self._gatherer.copy(segment.extent._replace(file=file, offset=offset + skip), view)
        else:
            assert isinstance(segment, Elements)
            shard = segment.shard
            offset = segment.start * shard.dtype.bits // 8 + skip
            self._gatherer.fill_bytes(shard, offset, view)


class RunningSums:
    """The sums of one block, kept while its bytes go by.

    Args:
        ledger: says which ranges are covered, and is told of what is finished.
        crc32: sums bytes up.
    """

    def __init__(self, ledger: CrcLedger, crc32: Checksum) -> None:
        self._ledger = ledger
        self._crc32 = crc32
        self._done: list[Sum] = []
        self._open: Sum | None = None
        self._published = 0

    def take(self, at: int, view: memoryview) -> None:
        """Add the bytes at `at`; they follow those of the last call."""
        for start, stop in self._ledger.overlapping(at, at + len(view)):
            part = view[start - at : stop - at]
            if self._open is not None and self._open.stop == start and not self._begins(start):
                crc = self._crc32(part, self._open.crc32)
                self._open = Sum(self._open.start, stop, crc)
            else:
                self._close()
                self._open = Sum(start, stop, self._crc32(part, 0))

    def publish(self) -> None:
        """Hand what is finished to the ledger."""
        self._close()
        for part in self._done[self._published :]:
            self._ledger.add(part)
        self._published = len(self._done)

    def finished(self) -> tuple[Sum, ...]:
        """Hand over the rest and return all sums of the block."""
        self.publish()
        return tuple(self._done)

    def _begins(self, start: int) -> bool:
        index = bisect_right(self._ledger._starts, start) - 1
        return index >= 0 and self._ledger._starts[index] == start

    def _close(self) -> None:
        if self._open is not None:
            self._done.append(self._open)
            self._open = None


SCHEMA = 1
_STEP = 4 << 20


def fingerprint(checkpoint: Checkpoint, layout: Layout) -> str:
    """Return a digest of all that decides the result's bytes: source files and layout.

    What tensors are computed from beside the source (an adapter) counts with its content.
    """
    import xxhash

    # Times may be equal in two places (an archive keeps seconds), and sizes are in two steps.
    state = xxhash.xxh3_128(repr(place_of(checkpoint.source)).encode())
    entries = checkpoint.source.entries
    for name in sorted(checkpoint.members()):
        entry = entries.get(name)
        seen = None if entry is None else (entry.size, entry.mtime, entry.etag)
        state.update(repr((name, seen)).encode())
    for other in checkpoint.made_from:
        _digest_content(state, other)
    state.update(layout_digest(layout).encode())
    digest: str = state.hexdigest()
    return digest


def layout_digest(layout: Layout) -> str:
    """Return a digest of the files of a layout, and of what each is made."""
    import xxhash

    state = xxhash.xxh3_128()
    for file in (*layout.files, *layout.commit):
        state.update(repr(("file", file.path, file.size)).encode())
        _digest_segments(state, file)
    digest: str = state.hexdigest()
    return digest


def _digest_content(state: Any, checkpoint: Checkpoint) -> None:
    """Take in the bytes of all files of a checkpoint."""
    source = checkpoint.source
    for name in sorted(source.entries.keys() & set(checkpoint.members())):
        size = source.size(name)
        state.update(repr(("made from", name, size)).encode())
        with source.open(name) as reader:
            for at in range(0, size, _STEP):
                state.update(reader.read(at, min(_STEP, size - at)))


def _digest_segments(state: Any, file: OutputFile) -> None:
    for segment in file.segments:
        if isinstance(segment, Literal):
            state.update(segment.data)
        elif isinstance(segment, Elements):
            shard = segment.shard
            what = (shard.shape, shard.dtype.name, shard.fills, segment.start, segment.stop)
            state.update(repr(what).encode())
        elif isinstance(segment, (Stored, Zeros)):
            state.update(repr(segment).encode())
        else:
            state.update(repr((type(segment).__name__, segment.ranges)).encode())


def header(plan: str, place: str = "") -> bytes:
    """Return the first line of a journal.

    Args:
        plan: fingerprint of the transfer.
        place: what the staging place is called, where parts build in it.
    """
    return _line({"schema": SCHEMA, "transfer": plan} | ({"place": place} if place else {}))


def read_place(data: bytes) -> str:
    """Return what a staging place is called by its journal; "" where no part has begun it."""
    try:
        return str(decode(data.partition(b"\n")[0]).get("place", ""))
    except (ValueError, AttributeError):
        return ""


def announced(files: Iterable[str]) -> bytes:
    """Return the second line of a transfer's marker in an object store: what it writes."""
    return json.dumps({"files": sorted(files)}).encode() + b"\n"


def read_announced(marker: bytes) -> frozenset[str]:
    """Return what a transfer says in its marker that it writes, relative to its destination.

    Raises:
        ValueError: the marker does not say it.
        UnsafeError: it names what is not below its destination, or ftckpt's own records there.
    """
    try:
        files = frozenset(decode(marker.split(b"\n")[1])["files"])
        for path in files:
            if own_path(path, "", named_by="the marker of a transfer").split("/")[0] == FOLDER:
                raise UnsafeError(
                    f"the marker of a transfer names {path!r}, which no transfer builds: nothing is"
                    " touched",
                    kind="unsafe-path",
                )
        return files
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ValueError("the marker of a transfer is damaged") from error


def line(made: BlockMade) -> bytes:
    """Return the line of one block."""
    row = {
        "file": made.file,
        "block": made.number,
        "digest": made.digest.hex(),
        "sums": [list(part) for part in made.sums],
    }
    return _line(row | ({"note": made.note} if made.note else {}))


def shown_line(inode: int) -> bytes:
    """Return the line that says which directory or file is about to get the destination's name."""
    return _line({"shown": inode})


def read_shown(data: bytes) -> int | None:
    """Return the inode of what was about to be shown; None where no run came as far."""
    for text in reversed(data.split(b"\n")):
        if text.startswith(b'{"shown"'):
            try:
                return int(decode(text)["shown"])
            except (ValueError, TypeError, KeyError):
                continue
    return None


def read_plan(data: bytes) -> str | None:
    """Return the fingerprint in a journal's first line; None where it is torn or not understood."""
    try:
        head = decode(data.partition(b"\n")[0])
        return str(head["transfer"]) if head["schema"] == SCHEMA else None
    except (ValueError, TypeError, KeyError):
        return None


def read_blocks(data: bytes) -> Iterable[BlockMade]:
    """Yield the blocks of a journal; a line that is torn or not understood counts for nothing."""
    for text in data.split(b"\n")[1:]:
        try:
            row = decode(text)
            sums = tuple(Sum(int(a), int(b), int(c)) for a, b, c in row["sums"])
            digest, note = bytes.fromhex(row["digest"]), str(row.get("note", ""))
            yield BlockMade(str(row["file"]), int(row["block"]), digest, sums, note)
        except (ValueError, TypeError, KeyError, FtckptError):
            continue


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
