"""Hold a checkpoint to a signature: whose it is, and every file of the folder by its digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import FtckptError, TruncatedError
from ftckpt.findings import finding, from_error
from ftckpt.manifest.signature import (
    WHOLE,
    SignedPart,
    Trust,
    hasher,
    is_below,
    own_names,
    ranges_of,
    signature_place,
)
from ftckpt.own_files import FOLDER, MANIFEST
from ftckpt.storage.ranges import chunks, size_for
from ftckpt.storage.source import Source
from ftckpt.workers import Work
from ftckpt.workers.limits import RateLimit

from .evidence import ContentResult, Emit, Report


class PartToHash(NamedTuple):
    """A signed part to hash: a task of the engine."""

    source: Source
    name: str
    part: SignedPart
    limiter: RateLimit | None


class HashedPart(NamedTuple):
    """What hashing a part gave: its digest, or why it could not be read."""

    name: str
    part: SignedPart
    nbytes: int
    digest: str = ""
    error: FtckptError | None = None


def check_signed(checkpoint: Checkpoint, trust: Trust, *, emit: Emit, work: Work) -> ContentResult:
    """Compare every file with what was signed, after the signature itself was proven.

    The signature speaks of the whole folder: a file that it lists and that is not there
    (`missing-file`), and one that is there and that it does not list (`unsigned-file`), are as
    wrong as another digest (`bad-digest`). ftckpt's own files and what the signer left out do not
    count.

    Args:
        checkpoint: opened.
        trust: whose signature is accepted.
        emit: receives the findings when they are found.
        work: threads, rate limit and counter of bytes.

    Raises:
        StopChecking: from `emit`.
        UnavailableError: the storage does not answer, or Sigstore cannot be reached.
    """
    source = checkpoint.source
    report = Report(source, emit)
    nothing = ContentResult("none", 0, 0, source.nbytes, None, ok=False)
    try:
        signed = trust.read(source)
    except FtckptError as error:
        report.add(from_error(error))
        return nothing
    parts = ranges_of(signed)
    one = next(iter(source.entries)) if source.single else ""
    if (WHOLE in parts) is not source.single:
        signs, is_ = ("one file", "a folder") if WHOLE in parts else ("a folder", "one file")
        what = f"{signed.where} signs {signs}, and {source.url} is {is_}"
        report.add(finding("unsafe-signature", what))
        return nothing
    names = {one or name: name for name in parts}
    for name in sorted(names.keys() - source.entries.keys()):
        source.require_absent(name)
        what = f"{name} is signed, and is not there"
        report.add(finding("missing-file", what, file=name))
    left_out = (*signed.ignored, MANIFEST, FOLDER, *_itself(source, trust))
    for name in sorted(source.entries.keys() - names.keys()):
        empty = signed.shards and not source.size(name)  # has no range to sign
        if not is_below(name, left_out) and not empty:
            what = f"{name} is not signed: it came after the signature, or was never meant"
            report.add(finding("unsigned-file", what, file=name))
    there = {name: parts[signed_as] for name, signed_as in names.items() if name in source.entries}
    work.counter.start("checking what is signed", sum(source.size(name) for name in there))
    read = 0
    for done in work.run(_tasks(source, there, report, work), _hash_or_fail):
        work.counter.add(done.nbytes)
        read += done.nbytes
        if done.error is not None:
            report.fail(done.name, done.error)
        elif done.digest != done.part.digest and not report.changed(done.name):
            what = (
                f"{done.name} is not what was signed: its digest is {done.digest[:16]}…,"
                f" and {done.part.digest[:16]}… is signed"
            )
            report.add(finding("bad-digest", what, file=done.name, offset=done.part.start))
    covered = sum(source.size(name) for name in there)
    members = {name for name in checkpoint.members() if name in source.entries}
    own = (MANIFEST, FOLDER, *own_names()[:2])
    bare = tuple(sorted(name for name in members - there.keys() if not is_below(name, own)))
    uncovered = sum(source.size(name) for name in bare)
    return ContentResult(
        "signature", read, covered, uncovered, None, report.ok, bare, signer=signed.signer
    )


def _itself(source: Source, trust: Trust) -> Iterator[str]:
    """Yield the name of the signature in the folder; nothing where it lies elsewhere."""
    store, path = signature_place(source, trust.place, trust.stores)
    where = store.describe(path)
    yield from (n for n in source.entries if source.store.describe(source.path(n)) == where)


def _tasks(
    source: Source, parts: Mapping[str, Sequence[SignedPart]], report: Report, work: Work
) -> Iterator[PartToHash]:
    for name in sorted(parts):
        at, size = 0, source.size(name)
        for one in parts[name]:
            yield PartToHash(source, name, one, work.limiter)
            at = -1 if one.start != at else size if one.end is None else one.end
        if at != size:
            signed = f"{name} has {size} bytes, and others are signed"
            report.add(finding("bad-digest", signed, file=name))


def _hash_or_fail(task: PartToHash) -> HashedPart:
    part, source = task.part, task.source
    size = source.size(task.name)
    end = size if part.end is None else part.end
    length = end - part.start
    try:
        if end > size:
            raise TruncatedError(
                f"{task.name} has {size} bytes, and {end} were signed", file=task.name
            )
        made = hasher(part.algorithm)
        with source.open(task.name) as reader:
            for view in chunks(
                reader, part.start, length, size=size_for(source.store), limiter=task.limiter
            ):
                made.update(view)
        return HashedPart(task.name, part, length, made.hexdigest())
    except FtckptError as error:
        return HashedPart(task.name, part, 0, error=error)
