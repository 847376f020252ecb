"""Check files against the digests that a framework recorded of them: SHA-256, or MD5.

Compare the copies of files that lie in several of the places of one checkpoint.

Compare the copies of its files that a checkpoint keeps itself.

Every copy may be right in itself and be of another save: CRC-32s do not tell. If a manifest lists
their digests, nothing is read for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.findings import Finding, finding, from_error
from ftckpt.manifest import Manifest
from ftckpt.own_files import is_own
from ftckpt.storage.ranges import chunks, size_for
from ftckpt.storage.source import Source
from ftckpt.workers import ALONE, Work
from ftckpt.workers.limits import RateLimit

from .evidence import ContentResult, Emit, Report, Sample
from .replica import compare_or_fail, pairs_of

_MD5 = 32  # hexadecimal digits
_CALLED = {"md5": "MD5", "sha256": "SHA-256"}


class FileToHash(NamedTuple):
    """A file to hash: a task of the engine."""

    source: Source
    name: str
    limiter: RateLimit | None
    algorithm: str = "sha256"


class HashedFile(NamedTuple):
    """The digest of a file in hexadecimal digits, or why it could not be read."""

    name: str
    nbytes: int
    digest: str = ""
    error: FtckptError | None = None


def check_file_digests(
    checkpoint: Checkpoint,
    digests: Mapping[str, str],
    *,
    emit: Emit,
    work: Work = ALONE,
    sample: float | None = None,
) -> ContentResult:
    """Compare whole files with their recorded digests; report the others (`bad-digest`).

    Files that are recorded and not there are the structure's finding. A sample takes whole files.

    Args:
        checkpoint: opened.
        digests: name of a file -> SHA-256 or MD5 in hexadecimal digits.
        emit: receives the findings when they are found.
        work: threads, rate limit and counter of bytes.
        sample: share of the files to read; None for all.

    Raises:
        StopChecking: from `emit`.
        UnavailableError: the storage does not answer.
    """
    source = checkpoint.source
    report = Report(source, emit)
    chosen = Sample(sample, source.name)
    listed = sorted(name for name in digests if name in source.entries)
    taken = [name for name in listed if chosen.takes(name, 0, first=False)]
    # Parts of a checkpoint may record different ones; the weaker is what is said of all.
    algorithms = {name: "md5" if len(digests[name]) == _MD5 else "sha256" for name in digests}
    weakest = "md5" if "md5" in algorithms.values() else "sha256"
    work.counter.start(f"checking {_CALLED[weakest]}", sum(map(source.size, taken)))
    read = 0
    tasks = (FileToHash(source, name, work.limiter, algorithms[name]) for name in taken)
    for done in work.run(tasks, _hash_or_fail):
        work.counter.add(done.nbytes)
        read += done.nbytes
        if done.error is not None:
            report.fail(done.name, done.error)
        elif done.digest != digests[done.name] and not report.changed(done.name):
            called = _CALLED[algorithms[done.name]]
            message = (
                f"{done.name} has another {called} ({done.digest[:16]}…) than was recorded of it"
                f" ({digests[done.name][:16]}…)"
            )
            report.add(finding("bad-digest", message, file=done.name))
    members = {n for n in checkpoint.members() if n in source.entries and not is_own(n)}
    bare = tuple(sorted(members - set(listed)))
    covered = sum(source.size(name) for name in listed)
    uncovered = sum(source.size(name) for name in bare)
    return ContentResult(weakest, read, covered, uncovered, sample, report.ok, bare)


def sha256_of(source: Source, names: Iterable[str], *, work: Work = ALONE) -> dict[str, str]:
    """Return the SHA-256 of whole files, by name, in hexadecimal digits.

    Raises:
        FtckptError: a file cannot be read.
    """
    taken = sorted(names)
    work.counter.start("hashing for SHA-256", sum(source.size(name) for name in taken))
    found = {}
    for done in work.run([FileToHash(source, n, work.limiter) for n in taken], _hash_or_fail):
        if done.error is not None:
            raise done.error
        work.counter.add(done.nbytes)
        found[done.name] = done.digest
    return found


def with_records(result: ContentResult, records: ContentResult) -> ContentResult:
    """Return both checks as one: the records' CRC-32s cover what the digests leave out."""
    bare = result.bare
    if records.evidence != "none":  # where no record is, none lies in a bare file
        bare = tuple(name for name in bare if name in records.bare)
    return replace(
        result, bytes_read=result.bytes_read + records.bytes_read,
        ok=result.ok and records.ok, bare=bare, records=len(bare) < len(result.bare),
    )  # fmt: skip


def _hash_or_fail(task: FileToHash) -> HashedFile:
    size = task.source.size(task.name)
    try:
        return HashedFile(task.name, size, _digest(task))
    except FtckptError as error:
        return HashedFile(task.name, 0, error=error)


def _digest(task: FileToHash) -> str:
    made = hashlib.new(task.algorithm, usedforsecurity=False)
    for view in _views(task):
        made.update(view)
    return made.hexdigest()


def _views(task: FileToHash) -> Iterator[memoryview]:
    source = task.source
    with source.open(task.name) as reader:
        yield from chunks(
            reader, 0, source.size(task.name), size=size_for(source.store), limiter=task.limiter
        )


class CopiesOf(NamedTuple):
    """The copies of one file to compare: a task of the engine."""

    file: str


def check_copies(checkpoint: Checkpoint, work: Work) -> Iterator[Finding]:
    """Read every file that lies in several places, and yield those whose copies differ.

    The store compares the copies while one is read (`ftckpt.storage.several_places`). Copies of
    another size are the structure's finding.

    Raises:
        UnavailableError: the storage does not answer.
    """
    source = checkpoint.source
    names = [n for n in sorted(set(checkpoint.members())) if not is_own(n) and n in source.entries]
    shared = [n for n in names if source.entries[n].copies and not source.entries[n].differs]
    work.counter.start("comparing copies", sum(source.size(name) for name in shared))

    def compare(one: CopiesOf) -> CorruptError | None:
        try:
            _read(checkpoint, one.file, work)
        except CorruptError as error:
            return error
        return None

    for error in work.each(map(CopiesOf, shared), compare):
        if error is not None:
            yield from_error(error)


def _read(checkpoint: Checkpoint, name: str, work: Work) -> None:
    source = checkpoint.source
    size = size_for(source.store)
    with source.open(name) as reader:
        for part in chunks(reader, 0, source.size(name), size=size, limiter=work.limiter):
            work.counter.add(len(part))


def check_file_copies(
    checkpoint: Checkpoint,
    *,
    emit: Emit,
    work: Work,
    manifest: Manifest | None,
    sample: float | None = None,
    bad: Collection[str] = (),
) -> tuple[int, bool]:
    """Report the copies of a file that differ (`copies-differ`).

    Args:
        checkpoint: keeps copies of its files.
        emit: takes the findings.
        work: how.
        manifest: has the digests of all files, if the checkpoint is sealed.
        sample: share of the blocks to compare; None for all.
        bad: files with damage that is known already: they differ, and nothing more is learnt.

    Returns:
        The bytes that were read, and whether no copy differs.

    Raises:
        StopChecking: from `emit`.
        UnavailableError: the storage does not answer.
    """
    source = checkpoint.source
    report = Report(source, emit)
    pairs = list(_pairs(checkpoint.file_copies, source.entries, bad))
    if manifest is not None:
        for first, other in pairs:
            ours, theirs = (manifest.by_path.get(name) for name in (first, other))
            if ours is not None and theirs is not None and ours.digest != theirs.digest:
                report.add(finding("copies-differ", _differ(first, other), file=other))
        return 0, report.ok
    chosen = Sample(sample, source.name)
    alike = []
    for first, other in pairs:
        if source.size(first) == source.size(other):
            alike.append((first, other))
        else:
            report.add(finding("copies-differ", _differ(first, other), file=other))
    total = sum(source.size(first) for first, _ in alike)
    work.counter.start("comparing copies", None if sample else total)
    read = 0
    first_of = {other: first for first, other in alike}
    tasks = (
        pair
        for first, other in alike
        for pair in pairs_of(
            ((source.store, source.path(first)), (source.store, source.path(other))),
            other, source.size(first), chosen, report, work.limiter,
        )
    )  # fmt: skip
    for done in work.run(tasks, compare_or_fail):
        work.counter.add(done.length)
        if done.error is not None:
            report.fail(done.file, done.error)
            continue
        read += 2 * done.length
        if done.first is None or done.last is None or report.changed(done.file):
            continue
        what = f"{_differ(first_of[done.file], done.file)} in bytes {done.first} to {done.last}"
        length = done.last + 1 - done.first
        report.add(finding("copies-differ", what, file=done.file, offset=done.first, length=length))
    return read, report.ok


def _differ(first: str, other: str) -> str:
    return f"{first} and {other}, copies of one file, differ"


def _pairs(
    copies: Mapping[str, Iterable[str]], entries: Collection[str], bad: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the first sound copy of each file with each other one, once."""
    seen: set[str] = set()
    for name, others in copies.items():
        if name in seen:
            continue
        group = [n for n in (name, *others) if n in entries and n not in bad]
        seen.update((name, *others))
        for other in group[1:]:
            yield group[0], other
