"""Copy one checkpoint, file for file and byte for byte, and show it when it is proven."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, CommitState
from ftckpt.discovery.shared_state import notes_of_shared_state
from ftckpt.errors import CorruptError, ExistsError, IncompleteError
from ftckpt.findings import Finding, Severity, as_error
from ftckpt.manifest import Manifest, PassedCheck
from ftckpt.manifest.locate import find
from ftckpt.manifest.seal import utc_now
from ftckpt.progress import NULL, expect_files
from ftckpt.reports import UNSAID, said_as
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.source import Source, followed_links
from ftckpt.transfer.places import name_of, require_names, require_outside
from ftckpt.transfer.request.example import blamed, require_unchanged
from ftckpt.transfer.staging import Staging
from ftckpt.transfer.write.blocks import BlockMade
from ftckpt.verification import check_structure
from ftckpt.verification.blocks import check_manifest
from ftckpt.verification.evidence import OwnerIndex
from ftckpt.version import __version__
from ftckpt.workers import Division, Work

from .carry_files import CopiedFile, Moved, Mover, Origin, ReplicaContents, contents_of
from .existing_destination import (
    destination_of,
    plan_of,
    renamed,
    require_apart_from_bases,
    require_as_sealed,
    require_beside,
    require_other,
    require_same,
    staging_at,
)
from .options import ReplicationOptions
from .trusted_manifest import BlockJudge, ManifestEvidence, record_evidence

_OPTIONS = ReplicationOptions()
_STORES = StoreOptions()


class CopiedBase(NamedTuple):
    """A base of a delta that was copied with it.

    Attributes:
        destination: where it stands.
        already_there: whether it stood there before.
    """

    destination: str
    already_there: bool


@dataclass(frozen=True)
class CopyReport:
    """What copying did.

    Attributes:
        url: where the replica stands.
        format: its format.
        step: as the content shows it; None where nothing does.
        files: that belong to the checkpoint, or were carried with it.
        nbytes: bytes of them.
        evidence: what the source's bytes were held to: `manifest`, `crc32` or `none`.
        covered: bytes that the evidence covers.
        proven: whether what was written was read back and equals what had been read.
        sealed: whether the source had a manifest; else the replica's is the first.
        already_there: whether the same checkpoint stood there before.
        taken_over: bytes that an earlier, killed run had carried.
        left: names beside the source that were not carried.
        notes: links that were followed, and state of the step that lies elsewhere.
        bases: what a delta depends on, copied before it.
        seconds: how long each stage took.
    """

    url: str = field(metadata=UNSAID)
    format: str = field(metadata=UNSAID)
    step: int | None
    files: int
    nbytes: int = field(metadata=said_as("bytes"))
    evidence: str
    covered: int = field(metadata=said_as("bytes_covered"))
    proven: bool
    sealed: bool
    already_there: bool = False
    taken_over: int = 0
    left: Sequence[str] = ()
    notes: Sequence[Finding] = field(default=(), metadata=said_as("findings"))
    bases: Sequence[CopiedBase] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CopyJob:
    """A copy that is about to begin.

    Attributes:
        destination: path or URL of the replica.
        manifest: of the source, with the names of the replica; None without one.
        contents: the files.
        names: of the files that are read, in the source.
        sizes: of the files that are written, by path.
        plan: fingerprint of the transfer.
        staging: where it is built.
        report: with what is known before.
    """

    destination: str
    manifest: Manifest | None
    contents: ReplicaContents
    names: Sequence[str]
    sizes: Mapping[str, int]
    plan: str
    staging: Staging
    report: CopyReport


def prepare(
    checkpoint: Checkpoint,
    destination: str,
    options: ReplicationOptions = _OPTIONS,
    stores: StoreOptions = _STORES,
    *,
    by_parts: bool = False,
) -> CopyJob:
    """Decide what a copy reads and writes, and where; nothing is written yet.

    Args:
        checkpoint: opened; never written.
        destination: path or URL of the replica.
        options: how.
        stores: how to reach object stores.
        by_parts: whether several machines write it.

    Raises:
        FtckptError: see `copy`.
    """
    source = checkpoint.source
    destination = destination_of(source, destination)
    if checkpoint.commit.state is CommitState.UNCOMMITTED:
        raise IncompleteError(checkpoint.commit.message or f"{source.url} is not committed")
    with blamed(source, checkpoint.members()):
        manifest = find(source)
        name = name_of(destination) if source.single else ""
        contents = contents_of(checkpoint, manifest, beside=options.beside, called=name)
        step = checkpoint.step if manifest is None else manifest.step
        if manifest is not None and source.single:
            manifest = renamed(manifest, name)
    layout = contents.layout
    require_names(layout)
    names = [file.name for file in (*contents.files, *contents.beside)]
    report = CopyReport(
        destination,
        checkpoint.format,
        step,
        len(names),
        contents.nbytes,
        "none" if manifest is None else "manifest",
        0 if manifest is None else manifest.nbytes,
        options.proof,
        manifest is not None,
        left=contents.left,
        notes=[*followed_links(source, names), *notes_of_shared_state(source)],
    )
    require_other(source, destination, stores)
    staging = staging_at(source, destination, stores, by_parts=by_parts)
    place = open_store(destination, stores)
    require_outside(place)
    if options.proof:  # without it nothing that a delta depends on is asked for
        require_apart_from_bases(lambda: checkpoint, place)
    sizes = {file.path: file.size for file in layout.files}
    plan = plan_of(source, names, sizes)
    return CopyJob(destination, manifest, contents, names, sizes, plan, staging, report)


def copy(
    checkpoint: Checkpoint,
    destination: str,
    *,
    options: ReplicationOptions = _OPTIONS,
    stores: StoreOptions = _STORES,
    made: Iterable[BlockMade] = (),
    built: str = "",
    known: Division | None = None,
) -> CopyReport:
    """Make a replica of a checkpoint.

    Every byte is read once, hashed as it goes by, and held to the source's manifest or, where there
    is none, to the CRC-32s in its files; a block that is wrong is read once more. What was written
    is read back. The last act makes it visible: a rename on this machine; in an object store the
    format's commit marker and then the manifest. Killed at any instant, the destination is absent
    or whole, and the same call goes on where it was.

    Args:
        checkpoint: opened; never written.
        destination: path or URL of the replica; `DIR/` for its own name in DIR. What stands
            there already is not touched: the same checkpoint is an answer, anything else is
            refused.
        options: how.
        stores: how to reach object stores.
        made: blocks that parts have written there.
        built: what the staging place is called in which they did.
        known: knows what parts have read back and summed.

    Raises:
        CorruptError: the source is damaged, or what stands there already is, or the proof failed.
        IncompleteError: the source is not committed, or changed meanwhile.
        ExistsError: something else stands at the destination.
        RefusedError: another run is writing there, or it lies inside the source, what
            that depends on, or a sealed checkpoint.
        UnsafeError: a file is not regular, or a name leads out of the checkpoint.
        UsageError: one file would take the name of a bucket.
        NotFoundError: the directory around the destination does not exist.
        NoResourceError, DeniedError, UnavailableError: it could not be read or written.
    """
    began = time.monotonic()
    job = prepare(checkpoint, destination, options, stores, by_parts=bool(built))
    source, manifest, contents, staging = checkpoint.source, job.manifest, job.contents, job.staging
    names, sizes, report = job.names, job.sizes, job.report
    try:
        try:
            if staging.begin(job.plan, sizes, restart=options.restart):
                return replace(report, already_there=True, taken_over=contents.nbytes)
        except ExistsError as error:
            with blamed(source, names):
                require_same(source, manifest, job.destination, stores, options, error)
                require_as_sealed(source, manifest, options)
                beside = [file.name for file in contents.beside]
                require_beside(source, beside, job.destination, stores, options)
            return replace(report, already_there=True, evidence="manifest", covered=report.nbytes)
        if built:
            staging.believe(made, built)
        divided = replace(options.work, division=known)
        with blamed(source, names):
            if options.proof:
                _require_structure(checkpoint)
            evidence = evidence_of(checkpoint, manifest, contents, divided)
            options.work.counter.start("copying", contents.nbytes)
            expect_files(options.work.counter, len(contents.files) + len(contents.beside))
            moved = _move(source, contents, staging, evidence, options.work)
        copied = time.monotonic()
        require_unchanged(source, names)
        staging.date(times(source, [*contents.files, *contents.beside]))
        sealed = manifest or _manifest(checkpoint, contents, moved, evidence, options)
        data = sealed.dump()
        if staging.shows_before_proof:
            staging.publish({}, data)
        if options.proof:
            prove(staging.source({}), sealed, moved, divided)
        if not staging.shows_before_proof:
            staging.publish({}, data)
        return replace(
            report,
            evidence=evidence.name,
            covered=evidence.covered,
            taken_over=moved.taken_over,
            seconds={"copy": copied - began, "prove": time.monotonic() - copied},
        )
    except IncompleteError:
        staging.forget()
        raise
    finally:
        staging.close()


def prove(
    result: Source,
    manifest: Manifest,
    moved: Moved,
    work: Work,
) -> None:
    """Read back what was written and compare it with what had been read.

    Args:
        result: what was written.
        manifest: what the replica's files are.
        moved: what had been read, with the files that lie beside it.
        work: how; its counter is told of bytes proven.

    Raises:
        CorruptError: they differ (`failed-proof`).
    """
    wanted = replace(manifest, files=sorted(moved.files.values(), key=lambda file: file.path))

    def emit(found: Finding) -> None:
        if found.severity is Severity.ERROR:
            error = as_error(found)
            raise CorruptError(
                f"the proof failed: {error.message}",
                kind="failed-proof",
                file=error.file,
                offset=error.offset,
                length=error.length,
                hint="the source is untouched; --restart builds it anew",
            )

    check_manifest(
        result,
        wanted,
        emit=emit,
        work=work,
    )


def times(source: Source, files: Sequence[CopiedFile]) -> dict[str, float]:
    """Return when files were last written, by their path in the replica, where that is known.

    A replica that kept them is as old as its source where age decides what may go.
    """
    entries = {file.path: source.entries.get(file.name) for file in files}
    return {
        path: entry.mtime
        for path, entry in entries.items()
        if entry is not None and entry.mtime is not None
    }


def origin_in(source: Source) -> Callable[[CopiedFile, int], Origin]:
    """Return what says where a block of a file is read: always in the source itself."""

    def origin(file: CopiedFile, number: int) -> Origin:
        return Origin(source.store, source.path(file.name))

    return origin


def _move(
    source: Source,
    contents: ReplicaContents,
    staging: Staging,
    evidence: BlockJudge,
    work: Work,
) -> Moved:
    mover = Mover(staging, origin_in(source), evidence, work)
    moved = Moved()
    for files in contents.stages:
        mover.move(files, moved)
    return moved


def _require_structure(checkpoint: Checkpoint) -> None:
    """Refuse a source whose names, sizes or headers are damaged: nothing is read of it yet."""
    for found in check_structure(checkpoint, NULL):
        if found.severity is Severity.ERROR:
            raise as_error(found, "ftckpt verify SRC says more; --no-proof carries it as it is")


def evidence_of(
    checkpoint: Checkpoint, manifest: Manifest | None, contents: ReplicaContents, work: Work
) -> BlockJudge:
    """Return what the bytes of a copy are held to.

    Raises:
        CorruptError: a record that was read for this does not match.
    """
    owners = OwnerIndex(checkpoint)
    if manifest is not None:
        return ManifestEvidence(manifest, owners)
    found = record_evidence(checkpoint, owners, work)
    return found.renamed({file.name: file.path for file in contents.files})


def _manifest(
    checkpoint: Checkpoint,
    contents: ReplicaContents,
    moved: Moved,
    evidence: BlockJudge,
    options: ReplicationOptions,
) -> Manifest:
    """Return the first manifest of what was not sealed."""
    now = utc_now()
    checks = []
    if evidence.covered:
        checks = [PassedCheck("content", evidence.name, now)]
    elif options.proof:
        checks = [PassedCheck("structure", "none", now)]
    return Manifest(
        format=checkpoint.format,
        step=checkpoint.step,
        topology=replace(checkpoint.topology, evidence=""),
        files=sorted((moved.files[f.path] for f in contents.files), key=lambda f: f.path),
        unmanaged=sorted(file.path for file in contents.beside),
        checks=checks,
        tool=f"ftckpt {__version__}",
        created=now,
    )
