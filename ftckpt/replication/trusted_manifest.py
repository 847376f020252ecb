"""Decide which bytes of two replicas are right, and whether they replicate one checkpoint.

Check the bytes of a block against a manifest or CRC-32s while they are copied.

Either is asked about what has just been read, so that nothing is read for it. A CRC-32 covers a
record, and a record may lie in several blocks: then it is compared when the file is complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from ftckpt.amounts import human_bytes
from ftckpt.checkpoint import Checkpoint
from ftckpt.digests.blocks import hash_files
from ftckpt.digests.crc import combine
from ftckpt.discovery.step_names import worded_step
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    UnsafeError,
    UnsupportedError,
    UnverifiedError,
)
from ftckpt.extents import BLOCK
from ftckpt.findings import Finding, Severity, as_error
from ftckpt.manifest import FileDigest, Manifest, PassedCheck
from ftckpt.manifest.locate import find
from ftckpt.manifest.seal import utc_now
from ftckpt.own_files import is_own
from ftckpt.progress import NULL, expect_files
from ftckpt.storage.source import Source
from ftckpt.transfer.write.blocks import BlockMade, Sum
from ftckpt.verification import Level, VerifyOptions, verify
from ftckpt.verification.evidence import Owners, damaged
from ftckpt.verification.records import check_records
from ftckpt.version import __version__
from ftckpt.workers import ALONE, Work

from .damage import Diagnosis
from .existing_destination import renamed

Open = Callable[[Source], Checkpoint]
"""Opens the checkpoint that a place holds, with whatever formats are known."""


@dataclass(frozen=True)
class Authority:
    """What says which bytes are right.

    Attributes:
        manifest: of the whole checkpoint, with the names that the damaged one has.
        evidence: `manifest`, or `crc32` where neither is sealed and the replica's records match.
        own: whether it is the damaged checkpoint's own.
        damaged: whether that has one that cannot be read.
    """

    manifest: Manifest
    evidence: str
    own: bool
    damaged: bool


def authority(
    source: Source,
    replica: Source,
    opened: Open,
    work: Work,
) -> Authority:
    """Return what says which bytes of a damaged checkpoint and its replica are right.

    Args:
        source: the damaged one; it need not open.
        replica: the other.
        opened: opens either.
        work: how; its counter is told of what is read, where neither is sealed.

    Raises:
        RefusedError: they are not the same checkpoint.
        UnverifiedError: neither is sealed, and the replica's own records do not vouch for it.
    """
    (ours, damaged), (theirs, _) = _manifest_of(source), _manifest_of(replica)
    if theirs is not None and source.single:
        theirs = renamed(theirs, next(iter(source.entries)))
    if ours is not None and theirs is not None:
        if not ours.same_content(theirs):
            raise _other(source, replica, f"their manifests are of {_of(ours)} and {_of(theirs)}")
        return Authority(ours, "manifest", True, False)
    if ours is not None:
        _require_step(source, ours, replica, opened)
        return Authority(ours, "manifest", True, False)
    if theirs is not None:
        _require_names(source, replica, theirs)
        _require_step(replica, theirs, source, opened)
        return Authority(theirs, "manifest", False, damaged)
    made = _by_records(replica, opened, work)
    if source.single:
        made = renamed(made, next(iter(source.entries)))
    _require_names(source, replica, made)
    _require_step(replica, made, source, opened)
    return Authority(made, "crc32", False, damaged)


def require_alike(source: Source, replica: Source, found: Diagnosis) -> None:
    """Refuse to take another checkpoint's bytes: most of its own must be right already.

    Asked where the damaged checkpoint has no manifest of its own to say what it was.

    Raises:
        RefusedError: more than half of its bytes are not the replica's.
    """
    if 2 * found.bad_bytes > found.nbytes:
        share = (
            f"{human_bytes(found.bad_bytes)} of {human_bytes(found.nbytes)} are not the replica's"
        )
        raise _other(source, replica, f"it has no manifest, and {share}")


def require_explained(source: Source, opened: Open, found: Diagnosis, work: Work) -> None:
    """Demand that records of the damaged checkpoint show that each difference is damage there.

    Asked where neither has a manifest: a difference that no record covers may be either's.

    Raises:
        UnverifiedError: a block differs and nothing says which of the two is right.
    """
    try:
        findings = verify(opened(source), work=replace(work, counter=NULL)).findings
        wrong = [(f.file, f.offset, f.length) for f in findings if f.severity is Severity.ERROR]
    except FtckptError as error:
        wrong = [(error.file, error.offset, error.length)]
    for block in found.blocks:
        end = block.offset + block.length
        if block.why == "differs" and not any(
            file == block.file
            and (at is None or (at < end and at + max(length or 1, 1) > block.offset))
            for file, at, length in wrong
        ):
            raise UnverifiedError(
                f"bytes {block.offset} to {end} of {block.file} differ, and no evidence says which "
                "of the two is right",
                hint="seal the one that is known to be good: ftckpt seal PATH",
                file=block.file,
                offset=block.offset,
                length=block.length,
            )


def require_one_save(source: Source, replica: Source, opened: Open, work: Work) -> None:
    """Refuse a replica of another save, as records of the damaged checkpoint show it.

    Asked where the replica alone is sealed. A record that matches its own CRC-32 is not damage: if
    the replica's has another one, both were written so.

    Raises:
        RefusedError: a record is whole, and is not the replica's.
    """
    other = ""
    with suppress(FtckptError):  # what cannot be opened shows nothing
        theirs = {record.extent: record.crc32 for record in opened(replica).records()}
        ours = opened(source)
        mine = [r for r in ours.records() if r.crc32 is not None and r.extent.length]
        apart = [r for r in mine if theirs.get(r.extent, r.crc32) not in (r.crc32, None)]
        if apart:
            options = VerifyOptions(level=Level.CONTENT, use_manifest=False)
            report = verify(ours, options, work=replace(work, counter=NULL))
            bad = {f.file for f in report.findings if f.severity is Severity.ERROR}
            other = next((r.extent.file for r in apart if r.extent.file not in bad), "")
    if other:
        raise _other(
            source, replica, f"{other} differs and is not damage: its records match their CRC-32s"
        )


def _manifest_of(source: Source) -> tuple[Manifest | None, bool]:
    """Return the manifest of a place, if there is a readable one, and whether it is damaged."""
    try:
        return find(source), False
    except (CorruptError, UnsafeError):
        return None, True


def _require_step(known: Source, manifest: Manifest, other: Source, opened: Open) -> None:
    """Compare format and step, as far as the one without a manifest shows them."""
    # One that cannot be opened shows neither; that storage fails is another matter.
    with suppress(CorruptError, IncompleteError, NotFoundError, UnsafeError, UnsupportedError):
        checkpoint = opened(other)
        if checkpoint.format != manifest.format:
            raise _other(other, known, f"one is {checkpoint.format}, one {manifest.format}")
        if None not in (checkpoint.step, manifest.step) and checkpoint.step != manifest.step:
            raise _other(other, known, f"one is step {checkpoint.step}, one step {manifest.step}")


def _require_names(source: Source, replica: Source, manifest: Manifest) -> None:
    """Compare the steps in the names, where the content shows none."""
    ours, theirs = worded_step(source.name), worded_step(replica.name)
    if manifest.step is None and None not in (ours, theirs) and ours != theirs:
        raise _other(source, replica, f"their names say step {ours} and step {theirs}")


def _by_records(replica: Source, opened: Open, work: Work) -> Manifest:
    """Return what a replica holds, once its own digests or CRC-32s have shown that it is whole."""
    try:
        checkpoint = opened(replica)
        report = verify(checkpoint, work=work)
    except (CorruptError, UnsafeError) as error:
        raise _unknown(replica, error.message) from error
    if report.code is not ExitCode.OK or report.evidence not in ("sha256", "crc32"):
        raise _unknown(replica, report.message)
    sizes = {n: replica.size(n) for n in sorted(set(checkpoint.members())) if not is_own(n)}
    work.counter.start("hashing the replica", sum(sizes.values()))
    expect_files(work.counter, sum(1 for size in sizes.values() if size))
    digests = hash_files(replica, sizes, work=work)
    return Manifest(
        format=checkpoint.format,
        step=checkpoint.step,
        topology=replace(checkpoint.topology, evidence=""),
        files=[FileDigest(name, size, digests[name]) for name, size in sizes.items()],
        checks=[PassedCheck("content", report.evidence, utc_now())],
        tool=f"ftckpt {__version__}",
        created=utc_now(),
    )


def _unknown(replica: Source, why: str) -> UnverifiedError:
    return UnverifiedError(
        f"neither has a manifest, and {replica.url} does not vouch for itself: {why}",
        hint="what was never sealed can be compared, not repaired: ftckpt verify --against",
    )


def _of(manifest: Manifest) -> str:
    step = "a step that is not known" if manifest.step is None else f"step {manifest.step}"
    return f"{step}, {len(manifest.files)} files, {human_bytes(manifest.nbytes)}"


def _other(source: Source, replica: Source, why: str) -> RefusedError:
    return RefusedError(
        f"{replica.url} is not a replica of {source.url}: {why}",
        hint="ftckpt diff compares two checkpoints; ftckpt copy brings one to another name",
    )


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
        # The first record of a block that does not match, where it lies in that block alone.
        self._first: dict[tuple[str, int], Range] = {}
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
        wrong = set[int]()
        for number, made in blocks.items():
            for start, stop, crc in made.sums:
                if known.get((start, stop), crc) != crc:
                    wrong.add(number)
                    self._first.setdefault((path, number), (start, stop))
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
        start, stop = self._first.get((path, number), (offset, offset + length))
        offset, length = start, stop - start
        message = f"a record does not match its CRC-32 in bytes {start} to {stop} of {path}"
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
