"""Mend a checkpoint from replicas of its tensors: shards that several ranks wrote.

Megatron's local replicas (`__shadow_R__NAME`), and what replicated data parallelism saves on every
rank, are records in other files of the same save. A record that does not match its CRC-32 is read
from a replica of the same elements, if the recorded CRC-32 is that of the replica's bytes. So no
other step's bytes can take its place: they would have to have the same checksum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from ftckpt.checkpoint.read_tensor import stream_payload
from ftckpt.checkpoint.replicas import copies_of
from ftckpt.errors import FtckptError
from ftckpt.extents import Extent
from ftckpt.storage.readonly import StoreView
from ftckpt.storage.source import Source
from ftckpt.storage.store import Reader
from ftckpt.verification import Level, VerifyOptions, verify
from ftckpt.workers import Work

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint, Payload, TensorInfo
    from ftckpt.storage.store import Store


class Splice(NamedTuple):
    """Bytes of a file that are read from another place.

    Attributes:
        offset: the first of them.
        length: how many.
        path: key of the object that has them.
        at: where, there.
    """

    offset: int
    length: int
    path: str
    at: int


def has_replicas(checkpoint: Checkpoint) -> bool:
    """Say whether any piece of a tensor lies in the checkpoint more than once."""
    return any(piece.replica for info in checkpoint.tensors.values() for piece in info.pieces)


def spliced(checkpoint: Checkpoint, work: Work) -> Source:
    """Return the checkpoint's files with damaged records read from sound replicas of them.

    A record without such a replica is read as it is, damaged.
    """
    options = VerifyOptions(level=Level.CONTENT, use_manifest=False)
    report = verify(checkpoint, options, work=work)
    failed = {
        Extent(f.file, f.offset, f.length)
        for f in report.findings
        if f.kind == "bad-crc" and f.file is not None and f.offset is not None and f.length
    }
    recorded = {
        record.extent: record.crc32
        for record in checkpoint.records()
        if record.extent in failed and record.crc32 is not None and not record.transforms
    }
    source = checkpoint.source
    found: dict[str, list[Splice]] = defaultdict(list)
    for extent, replica in _replicas(checkpoint, recorded, failed):
        splice = Splice(extent.offset, extent.length, source.path(replica.file), replica.offset)
        found[source.path(extent.file)].append(splice)
    store = _Spliced(source.store, {path: sorted(several) for path, several in found.items()})
    return Source(store, source.base, source.entries, single=source.single, named=source.named)


def _replicas(
    checkpoint: Checkpoint, recorded: Mapping[Extent, int | None], failed: set[Extent]
) -> Iterator[tuple[Extent, Extent]]:
    """Yield each damaged record with a place that has what it should be."""
    files = {extent.file for extent in recorded}
    mended: set[Extent] = set()
    for info in checkpoint.tensors.values():
        if not any(piece.replica for piece in info.pieces):
            continue
        if files.isdisjoint(piece.extent.file for piece in info.pieces):
            continue
        for payloads in _payloads(checkpoint, info):
            for bad in payloads:
                if bad.extent not in recorded or bad.extent in mended:
                    continue
                for other in payloads:
                    if other.extent in failed or other.extent.length != bad.extent.length:
                        continue
                    if _crc32(checkpoint, other) == recorded[bad.extent]:
                        mended.add(bad.extent)
                        yield bad.extent, other.extent
                        break


def _payloads(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[Sequence[Payload]]:
    """Yield the places of each part of a tensor that lies there several times, dense ones alone."""
    for held in copies_of(info):
        found = []
        for piece in held.pieces if len(held.pieces) > 1 else ():
            try:
                payload = checkpoint.payload(piece)
            except FtckptError:  # what is around it is damaged too
                continue
            if payload.strides is None and not payload.transforms and payload.extent.length:
                found.append(payload)
        yield found


def _crc32(checkpoint: Checkpoint, payload: Payload) -> int | None:
    total = 0
    try:
        for block in stream_payload(checkpoint.source, payload):
            total = crc32(block, total)
    except FtckptError:
        return None
    return total


class _Spliced(StoreView):
    """A store in which parts of some objects are read from others."""

    def __init__(self, below: Store, splices: Mapping[str, Sequence[Splice]]) -> None:
        super().__init__(
            below, f"{below.url} is read with the bytes of replicas, and not written so"
        )
        self._splices = splices

    def open(self, path: str) -> Reader:
        """Open one object for ranged reads."""
        reader = self._below.open(path)
        splices = self._splices.get(path)
        return reader if not splices else _SplicedReader(reader, splices, self._below)

    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order."""
        found = []
        for file, offset, length in extents:
            with self.open(file) as reader:
                found.append(reader.read(offset, length))
        return found


class _SplicedReader(Reader):
    """One such object."""

    def __init__(self, below: Reader, splices: Sequence[Splice], store: Store) -> None:
        self._below = below
        self._splices = splices
        self._store = store

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`."""
        view = view.cast("B")
        self._below.readinto(offset, view)
        for splice in self._splices:
            start = max(offset, splice.offset)
            stop = min(offset + len(view), splice.offset + splice.length)
            if start < stop:
                with self._store.open(splice.path) as reader:
                    part = view[start - offset : stop - offset]
                    reader.readinto(splice.at + start - splice.offset, part)

    def close(self) -> None:
        """Release it."""
        self._below.close()
