"""Check the bytes of a block against a manifest or CRC-32s while they are copied.

Either is asked about what has just been read, so that nothing is read for it. A CRC-32 covers a
record, and a record may lie in several blocks: then it is compared when the file is complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from ftckpt.checkpoint import Checkpoint
from ftckpt.digests.crc import combine
from ftckpt.errors import FtckptError
from ftckpt.extents import BLOCK
from ftckpt.findings import Finding, Severity, as_error
from ftckpt.manifest import Manifest
from ftckpt.transfer.write.blocks import BlockMade, Sum
from ftckpt.verification.evidence import Owners, damaged
from ftckpt.verification.records import check_records
from ftckpt.workers import ALONE, Work

Range = tuple[int, int]


class BlockJudge(ABC):
    """Judges blocks by the file's path in the replica and the block's number.

    Attributes:
        name: `manifest`, `crc32` or `none`.
        covered: bytes that it covers.
    """

    name: str
    covered: int

    def ranges(self, path: str) -> Iterable[Range]:
        """Return the [start, stop) of a file whose CRC-32s are wanted; they do not overlap."""
        return ()

    @abstractmethod
    def doubts(self, path: str, blocks: Mapping[int, BlockMade]) -> Sequence[int]:
        """Return the numbers of those of `blocks` that it contradicts.

        What needs other blocks of the file too is not judged.
        """

    @abstractmethod
    def damage(self, path: str, number: int, length: int) -> FtckptError:
        """Return what is said of a block that was read twice and is wrong."""


class ManifestEvidence(BlockJudge):
    """Digests that were recorded when the checkpoint was sealed.

    Args:
        manifest: with the paths of the replica.
        owners: finds what lies in a range; None where nobody knows.
    """

    name = "manifest"

    def __init__(self, manifest: Manifest, owners: Owners | None = None) -> None:
        self._manifest = manifest
        self._owners = owners
        self.covered = manifest.nbytes

    def doubts(self, path: str, blocks: Mapping[int, BlockMade]) -> Sequence[int]:
        """Compare digests; a file that the manifest does not list is not judged."""
        sealed = self._manifest.by_path.get(path)
        if sealed is None:
            return ()
        return [n for n, made in blocks.items() if made.digest != sealed.block(n)]

    def damage(self, path: str, number: int, length: int) -> FtckptError:
        """Name the bytes and what lies in them."""
        offset = number * BLOCK
        message = f"{path} differs from the manifest in bytes {offset} to {offset + length}"
        return as_error(damaged("bad-digest", message, path, offset, length, self._owners), _HINT)


class RecordEvidence(BlockJudge):
    """CRC-32s that the format recorded; none at all where it records none.

    Args:
        crcs: by file and by [start, stop); ranges of one file do not overlap.
        owners: finds what lies in a range.
    """

    def __init__(self, crcs: Mapping[str, Mapping[Range, int]], owners: Owners | None) -> None:
        self._crcs = crcs
        self._owners = owners
        # Those that lie in several blocks, by file.
        self._long = {
            path: [r for r in found if r[0] // BLOCK != (r[1] - 1) // BLOCK]
            for path, found in crcs.items()
        }
        self.covered = sum(stop - start for found in crcs.values() for start, stop in found)
        self.name = "crc32" if self.covered else "none"

    def renamed(self, paths: Mapping[str, str]) -> RecordEvidence:
        """Return the same of files that have other paths in the replica."""
        crcs = {paths[name]: found for name, found in self._crcs.items() if name in paths}
        return RecordEvidence(crcs, self._owners)

    def ranges(self, path: str) -> Iterable[Range]:
        """Return where the records lie."""
        return self._crcs.get(path, {})

    def doubts(self, path: str, blocks: Mapping[int, BlockMade]) -> Sequence[int]:
        """Compare every record that lies in `blocks` alone."""
        known = self._crcs.get(path, {})
        wrong = {
            number
            for number, made in blocks.items()
            for start, stop, crc in made.sums
            if known.get((start, stop), crc) != crc
        }
        for start, stop in self._long.get(path, ()):
            inside = range(start // BLOCK, (stop - 1) // BLOCK + 1)
            if all(number in blocks for number in inside):
                parts = [s for n in inside for s in blocks[n].sums if start <= s.start < stop]
                if _combined(parts) != known[start, stop]:
                    wrong.update(inside)
        return sorted(wrong)

    def damage(self, path: str, number: int, length: int) -> FtckptError:
        """Name the bytes and what lies in them."""
        offset = number * BLOCK
        message = f"a record does not match its CRC-32 in bytes {offset} to {offset + length}"
        message += f" of {path}"
        return as_error(damaged("bad-crc", message, path, offset, length, self._owners), _HINT)


def record_evidence(
    checkpoint: Checkpoint,
    owners: Owners | None,
    work: Work = ALONE,
) -> RecordEvidence:
    """Return the CRC-32s of an unsealed checkpoint that can be compared as its bytes go by.

    A record that was compressed before its CRC-32 was made cannot be: such a checkpoint is read
    once more, before anything is written.

    Args:
        checkpoint: opened.
        owners: finds what lies in a range.
        work: how it is read; its counter is told of the bytes.

    Raises:
        CorruptError: a record that was read for this does not match.
    """
    found: dict[str, dict[Range, int]] = {}
    apart = False
    for record in checkpoint.records():
        if record.crc32 is None or not record.extent.length:
            continue
        if record.transforms:
            apart = True
            continue
        file, offset, _ = record.extent
        found.setdefault(file, {})[offset, record.extent.end] = record.crc32
    for path, crcs in found.items():
        places = sorted(crcs)
        if any(a[1] > b[0] for a, b in pairwise(places)):
            apart = True
            found[path] = {}
    if apart:
        check_records(checkpoint, emit=_raise_error, work=work)
    return RecordEvidence(found, owners)


def _combined(parts: Sequence[Sum]) -> int:
    crc = 0
    for part in sorted(parts):
        crc = combine(crc, part.crc32, part.stop - part.start)
    return crc


def _raise_error(found: Finding) -> None:
    if found.severity is Severity.ERROR:
        raise as_error(found, _HINT)


_HINT = "ftckpt verify SRC says what else is damaged; ftckpt repair takes it from a replica"
