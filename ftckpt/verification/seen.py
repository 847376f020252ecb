"""What other work reads of a checkpoint, summed up on the way, so that a check reads it no more.

A transfer and a seal read every byte anyhow. What they read is held to the evidence there is: the
CRC-32s of records, whose parts may be read in any order, and the digests of a manifest's blocks,
which are made of bytes in order. A block whose bytes come in another order, and a record of which
a part was not read, are read once more by the check itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Checkpoint, Record
from ftckpt.digests.blocks import block_length
from ftckpt.errors import FtckptError
from ftckpt.extents import BLOCK, Extent
from ftckpt.findings import Finding
from ftckpt.manifest import Manifest
from ftckpt.manifest.locate import find

from .record_sums import ByteRun, ReadSums, RecordIndex

if TYPE_CHECKING:
    from ftckpt.storage.source import Source

# What of a block may be read here, so that the rest is in order: a share, or this many bytes.
_SHARE, _LEAST = 32, 64 << 10
_CHUNK = 1 << 20


class SeenRuns(NamedTuple):
    """What one thread, or a copy of this process, has summed up."""

    records: list[ByteRun]
    blocks: list[tuple[str, int, bytes]]


class SeenBytes:
    """Sums up what is read of a checkpoint; may be told by many threads.

    Args:
        checkpoint: opened.
        use_manifest: whether a manifest beside it counts.

    Attributes:
        ended: whether the work that reads it has ended, and the check can ask.
        differing: files of which bytes were read that contradict the evidence. Where the check
            then finds them whole, they were read wrongly once, and what was made of them is wrong.
        findings: of the check of the structure, which came before.
        taken: bytes that the check did not read because they were read before.
    """

    def __init__(self, checkpoint: Checkpoint, *, use_manifest: bool = True) -> None:
        self.ended = False
        self.differing: list[str] = []
        self.findings: tuple[Finding, ...] = ()
        self.taken = 0
        self._checkpoint = checkpoint
        self._use_manifest = use_manifest
        self._blocks: BlockSums | None = None
        self._records: ReadSums | None = None
        self._whole: set[tuple[Extent, tuple[int, int] | None]] = set()

    def begin(self) -> None:
        """Find the evidence, which may read headers: best while reads go ahead."""
        if self._checkpoint.decoding.proves_reads:
            return  # each reading is held to its own digest
        manifest = _manifest_of(self._checkpoint) if self._use_manifest else None
        if manifest is None:
            self._records = ReadSums(RecordIndex(self._checkpoint))
        else:
            self._blocks = BlockSums(self._checkpoint.source, manifest)

    def saw(self, file: str, offset: int, data: memoryview) -> None:
        """Sum up bytes of a file that were just read."""
        if self._records is not None:
            self._records.saw(file, offset, data)
        if self._blocks is not None:
            self._blocks.saw(file, offset, data)

    def undid(self, extent: Extent) -> None:
        """Hear that a compressed record was undone; its sum is not known by that."""

    def drain(self) -> SeenRuns:
        """Return what this thread has summed up since it was asked last."""
        records = [] if self._records is None else self._records.drain()
        return SeenRuns(records, [] if self._blocks is None else self._blocks.drain())

    def take(self, runs: SeenRuns) -> None:
        """Keep what a thread, or a copy of this process, has drained; by one thread alone."""
        if self._records is not None:
            self._records.take(runs.records)
        if self._blocks is not None:
            self._blocks.take(runs.blocks)

    def end(self) -> None:
        """Say that the work has ended; all that it has read was taken."""
        self.ended = True
        if self._records is not None:
            for record, same in self._records.whole():
                if same:
                    self._whole.add((record.extent, record.inner))
                else:
                    self.differing.append(record.extent.file)
        if self._blocks is not None:
            self.differing += self._blocks.differing()

    def shows(self, record: Record) -> bool:
        """Say whether a record was read from end to end and is what its CRC-32 says."""
        return (record.extent, record.inner) in self._whole

    def hashed(self, file: str, number: int) -> bytes | None:
        """Return the digest of a block as it was read; None where it was not, or not in order."""
        return None if self._blocks is None else self._blocks.digests.get((file, number))


class BlockSums:
    """Hashes the blocks of sealed files while these are read, in whatever order that is.

    A block is hashed from its beginning. Where a reader begins a little later (a header is skipped,
    or another thread reads the end of the tensor before), what is between is read here, and so is a
    little that is left at its end.

    Args:
        source: the files.
        manifest: of them.

    Attributes:
        digests: of the blocks of which all bytes came in order.
    """

    def __init__(self, source: Source, manifest: Manifest) -> None:
        self.digests: dict[tuple[str, int], bytes] = {}
        self._source = source
        self._manifest = manifest
        self._sizes: Mapping[str, int] = {
            one.path: one.size
            for one in manifest.files
            if one.path in source.entries and source.entries[one.path].size == one.size
        }
        self._lock = threading.Lock()
        self._running: dict[tuple[str, int], _Running] = {}
        self._done: set[tuple[str, int]] = set()
        self._made: list[tuple[str, int, bytes]] = []

    def saw(self, file: str, offset: int, data: memoryview) -> None:
        """Hash bytes of a file that were just read."""
        size = self._sizes.get(file)
        if size is None:
            return
        at, end = offset, offset + len(data)
        while at < end:
            number = at // BLOCK
            stop = min(end, (number + 1) * BLOCK)
            with self._lock:
                running = self._running.get((file, number))
                if running is None and (file, number) not in self._done:
                    length = block_length(size, number)
                    running = self._running[file, number] = _Running(number * BLOCK, length)
            if running is not None:
                running.add(at, data[at - offset : stop - offset], self._source, file)
            at = stop

    def drain(self) -> list[tuple[str, int, bytes]]:
        """Return the blocks that were hashed to their end since this was asked last."""
        with self._lock:
            running = list(self._running.items())
        for (file, number), one in running:
            digest = one.ended or one.fill_up(self._source, file)
            if digest is not None:
                with self._lock:
                    if self._running.pop((file, number), None) is not None:
                        self._done.add((file, number))
                        self._made.append((file, number, digest))
        with self._lock:
            made, self._made = self._made, []
        return made

    def take(self, made: Iterable[tuple[str, int, bytes]]) -> None:
        """Keep what was drained."""
        for file, number, digest in made:
            self.digests[file, number] = digest

    def differing(self) -> list[str]:
        """Return the files with blocks that are not what was sealed."""
        known = self._manifest.by_path
        return [f for (f, number), made in self.digests.items() if known[f].block(number) != made]


class _Running:
    """One block on its way.

    Attributes:
        ended: its digest, when all bytes have come.
    """

    def __init__(self, begin: int, length: int) -> None:
        import xxhash

        self.ended: bytes | None = None
        self._at, self._end = begin, begin + length  # the byte of the file that comes next
        self._state = xxhash.xxh3_128()
        self._may_fill = max(_LEAST, length // _SHARE)
        self._lock = threading.Lock()

    def add(self, at: int, data: memoryview, source: Source, file: str) -> None:
        """Hash bytes that begin at a place of the file."""
        end = at + len(data)
        with self._lock:
            if self._at < end and self._fill(at, source, file):
                self._state.update(data[self._at - at :])
                self._at = end
                if end == self._end:
                    self.ended = self._state.digest()

    def fill_up(self, source: Source, file: str) -> bytes | None:
        """Read and hash the rest if it is small; return the digest then."""
        with self._lock:
            if self.ended is None and self._fill(self._end, source, file):
                self.ended = self._state.digest()
            return self.ended

    def _fill(self, until: int, source: Source, file: str) -> bool:
        """Read and hash what is missing before a place; return whether nothing is missing then."""
        missing = until - self._at
        if missing <= 0:
            return True
        if missing > self._may_fill:
            return False
        self._may_fill -= missing
        with source.store.open(source.path(file)) as reader:
            for start in range(self._at, until, _CHUNK):
                self._state.update(reader.read(start, min(_CHUNK, until - start)))
        self._at = until
        return True


def _manifest_of(checkpoint: Checkpoint) -> Manifest | None:
    try:
        return find(checkpoint.source)
    except FtckptError:
        return None  # the check of the structure reports it
