"""Check files against the digests that a framework recorded of them: SHA-256, or MD5."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import FtckptError
from ftckpt.findings import finding
from ftckpt.own_files import is_own
from ftckpt.storage.chunks import chunks, size_for
from ftckpt.storage.source import Source
from ftckpt.workers import ALONE, Work
from ftckpt.workers.limits import RateLimit

from .evidence import ContentResult, Emit, Report, Sample

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
