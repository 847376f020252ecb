"""Find tensors that both sides record as equal, and the record that says so.

What is recorded is what was written, and not what the disk holds now: it saves reading only where
the user says so, and contradicts what was read where that is damaged.

A digest of a tensor says so whatever the layout. Else only pieces that lie in the same files at the
same places are asked about: what a manifest or a CRC-32 covers is bytes of a file, and says nothing
of a tensor that is divided otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import cached_property

from ftckpt.checkpoint import Checkpoint, Piece
from ftckpt.errors import FtckptError
from ftckpt.extents import BLOCK, Extent
from ftckpt.manifest import FileDigest, Manifest
from ftckpt.manifest.locate import find
from ftckpt.verification.record_sums import RecordIndex


class Basis(StrEnum):
    """What the answer about one tensor rests on."""

    READ = "read"  # every byte of both
    MANIFEST = "manifest"  # both were sealed, and the digests of their blocks are the same
    DIGEST = "digest"  # both formats recorded the tensor's digest, and they are the same
    CRC32 = "crc32"  # the same records with the same CRC-32s
    TIED = "tied"  # it has the bytes of a tensor that was compared
    HEADERS = "headers"  # names, shapes and types alone


class RecordedEqual:
    """Asks the recorded digests, the manifests and the recorded CRC-32s of two checkpoints.

    Args:
        ours: the first, opened.
        theirs: the second.
        records: of both, by place.
    """

    def __init__(
        self, ours: Checkpoint, theirs: Checkpoint, records: tuple[RecordIndex, RecordIndex]
    ) -> None:
        self._ours, self._theirs = ours, theirs
        self._records = records

    def evidence(self, key: str, other: str) -> Basis | None:
        """Return what says that a tensor of the first is one of the second; None where nothing.

        Args:
            key: of the first checkpoint's tensor.
            other: of the second's; both have one shape and type.
        """
        recorded = [
            digests.get(name) for digests, name in zip(self._digests, (key, other), strict=True)
        ]
        if recorded[0] is not None and recorded[0] == recorded[1]:
            return Basis.DIGEST
        one, two = (
            [piece for piece in tensors[name].pieces if not piece.replica]
            for tensors, name in ((self._ours.tensors, key), (self._theirs.tensors, other))
        )
        if not one or [_geometry(p) for p in one] != [_geometry(p) for p in two]:
            return None
        places = [piece.extent for piece in one]
        if places == [piece.extent for piece in two] and self._sealed_equal(places):
            return Basis.MANIFEST
        if self._ours.format == self._theirs.format and self._sums_equal(one, two):
            return Basis.CRC32
        return None

    def sealed_objects(self) -> Iterator[str]:
        """Yield the names of objects whose bytes are the same by both manifests."""
        for name, info in self._ours.objects.items():
            other = self._theirs.objects.get(name)
            same = other is not None and info.extent == other.extent
            if same and self._sealed_equal([info.extent]):
                yield name

    def _sealed_equal(self, extents: list[Extent]) -> bool:
        if None in self._manifests:
            return False
        for extent in extents:
            files = [self._files[side].get(extent.file) for side in (0, 1)]
            if files[0] is None or files[1] is None or files[0].size != files[1].size:
                return False
            for block in range(extent.offset // BLOCK, -(-extent.end // BLOCK)):
                if files[0].block(block) != files[1].block(block):
                    return False
        return True

    def _sums_equal(self, ours: list[Piece], theirs: list[Piece]) -> bool:
        one, two = self._records
        for mine, other in zip(ours, theirs, strict=True):
            recorded = list(_within(one, mine))
            if not recorded or recorded != list(_within(two, other)):
                return False
            if any(crc is None for *_, crc in recorded):
                return False
            covered = sum(length for _, length, *_ in recorded)
            if not mine.packed and covered < mine.extent.length:
                return False
        return True

    @cached_property
    def _digests(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        return self._ours.decoding.digests(), self._theirs.decoding.digests()

    @cached_property
    def _manifests(self) -> tuple[Manifest | None, Manifest | None]:
        return _manifest(self._ours), _manifest(self._theirs)

    @cached_property
    def _files(self) -> tuple[Mapping[str, FileDigest], Mapping[str, FileDigest]]:
        first, second = self._manifests
        assert first is not None
        assert second is not None
        return _as_listed(self._ours, first), _as_listed(self._theirs, second)


def _geometry(piece: Piece) -> tuple[object, ...]:
    return piece.box, piece.flat, piece.strides, piece.packed, piece.first, piece.extent.length


def _manifest(checkpoint: Checkpoint) -> Manifest | None:
    try:
        return find(checkpoint.source)
    except FtckptError:
        return None  # a manifest that cannot be read says nothing: `verify` reports it


def _as_listed(checkpoint: Checkpoint, sealed: Manifest) -> Mapping[str, FileDigest]:
    """Return the files of a manifest that are still of the size that was sealed."""
    entries = checkpoint.source.entries
    return {f.path: f for f in sealed.files if f.path in entries and entries[f.path].size == f.size}


def _within(index: RecordIndex, piece: Piece) -> Iterator[tuple[object, int, object, int | None]]:
    """Yield place, length and CRC-32 of every record in a piece's bytes, or around them."""
    _, offset, _ = piece.extent
    records = index.records.get(piece.extent.file, ())
    first = bisect_left(index.starts.get(piece.extent.file, ()), offset)
    # A storage that several tensors share begins before the later ones.
    while first and records[first - 1].extent.end > offset:
        first -= 1
    for record in records[first:]:
        if record.extent.offset >= piece.extent.end:
            return
        yield (
            (record.extent.offset - offset, record.inner),
            record.extent.length,
            record.transforms,
            record.crc32,
        )
