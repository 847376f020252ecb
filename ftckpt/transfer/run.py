"""Carry a transfer out, from the layout to the visible result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from posixpath import basename
from typing import TYPE_CHECKING, Protocol

from ftckpt.checkpoint import Checkpoint, Topology
from ftckpt.checkpoint.read_ahead import reading_ahead
from ftckpt.discovery.recognise import Format
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    NoResourceError,
    UnsupportedError,
    UnverifiedError,
    error_of,
)
from ftckpt.extents import Extent
from ftckpt.findings import listed
from ftckpt.manifest import FileDigest, Manifest, PassedCheck, ThinnedFrom
from ftckpt.manifest.locate import thinned_from
from ftckpt.manifest.seal import utc_now
from ftckpt.reports import UNSAID, said_as
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.store import Store
from ftckpt.transfer.prove.against_source import Proof, Prover, SameObjects, prove
from ftckpt.transfer.prove.source_sums import ReadForProof, SourceSums
from ftckpt.transfer.read.elements import Gatherer, of_layout
from ftckpt.transfer.write.blocks import BlockMade, fingerprint
from ftckpt.transfer.write.files import Built, build, commit_bytes, digest_of_bytes
from ftckpt.transfer.write.peek_output import Written, depths_of, in_order
from ftckpt.verification import VerifyReport
from ftckpt.verification.seen import SeenBytes
from ftckpt.version import __version__
from ftckpt.workers import ALONE, Division, Work
from ftckpt.workers.buffers import buffer
from ftckpt.workers.limits import RateLimit

from .content import Content
from .layout import Layout, OutputFile
from .places import absolute, around, name_of, require_apart_from_all, require_names, staging_name
from .request import example as changes
from .staging import Staging

if TYPE_CHECKING:
    from .request.dry_run import BoxCopy, Planned

_CHUNK = 8 << 20  # bytes of a source that are read at once where only their sum is wanted
_SUM_SLOT = 6


class SourceCheck(Protocol):
    """Verifies a source, by itself or by what is read of it for the transfer."""

    def __call__(self, seen: SeenBytes | None = None) -> VerifyReport:
        """Verify it.

        Args:
            seen: what the transfer reads: asked before it only the structure is checked, and after
                it the content (see `ftckpt.verification.VerifyOptions`). None: all of it, now.
        """


@dataclass(frozen=True)
class TransferOptions:
    """How a transfer is carried out.

    Attributes:
        work: with which threads or processes; its counter is told of bytes written and proven.
        proof: whether the result is read back and compared before it is visible.
        device: where elements are placed and cast: `cpu`, `cuda`, `cuda:N`, or `auto`.
        restart: forget what earlier runs have left at the destination, and build it anew.
        thinned: for the manifest: of what the result holds the weights alone. Such a result is made
            to save space: if there is none for it, what was built so far is removed.
    """

    work: Work = ALONE
    proof: bool = True
    device: str = "cpu"
    restart: bool = False
    thinned: ThinnedFrom | None = None


@dataclass(frozen=True)
class TransferReport:
    """What a transfer did.

    Attributes:
        url: where the result stands.
        format: its format.
        files: data files and small ones.
        nbytes: bytes of them.
        taken_over: bytes that an earlier, killed run had made.
        already_there: whether an earlier run had finished and this one only swept up.
        proof: what was compared; None with `proof=False`, or where nothing was left to do.
        extra_read: bytes of the source that its check and the proof have read, beside those that
            were read for the writing and served them too.
        seconds: how long each stage took.
        manifest: as written; None where an earlier run had finished.
        plan: what it would cost, where nothing was to be written.
        copies: every box that would be copied, then.
    """

    url: str = field(metadata=UNSAID)
    format: str = field(metadata=UNSAID)
    files: int
    nbytes: int = field(metadata=said_as("bytes"))
    taken_over: int = 0
    already_there: bool = False
    proof: Proof | None = None
    extra_read: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    manifest: Manifest | None = field(default=None, metadata=UNSAID)
    plan: Planned | None = field(default=None, metadata=UNSAID)
    copies: Sequence[BoxCopy] = field(default=(), metadata=UNSAID)

    @property
    def reported(self) -> bool:
        """Whether the document has all of it already."""
        return self.plan is not None


def transfer(
    content: Content,
    layout: Layout,
    destination: str,
    target: Format,
    *,
    single: bool,
    same_objects: SameObjects,
    options: TransferOptions,
    store_options: StoreOptions,
    check: SourceCheck | None = None,
    prover: Prover = prove,
    parts: BuiltByParts | None = None,
) -> TransferReport:
    """Write `content` as `layout` says, prove it, and make it visible at `destination`.

    Killed at any instant the destination is absent or whole, the source is untouched, and the same
    call goes on where it was. Where tensors lie in the source as they are, each byte of it is read
    once: the check and the proof have the sums of what was read for the writing.

    Args:
        content: what is written.
        layout: in which files; from a writer of the format `target`.
        destination: a local path or a URL that does not exist yet.
        target: the format that reads the result back.
        single: whether the result is one file, `layout.files` holding just it.
        same_objects: how objects are compared.
        options: how.
        store_options: how to reach object stores.
        check: verifies the source; asked when the destination is ours and before anything is
            visible. What is written gets new checksums, which would hide damage that the old ones
            show.
        prover: compares the result with the content.
        parts: what others have built there and proven.

    Raises:
        ExistsError: something stands at the destination.
        RefusedError: another run is writing there, or it lies inside the source, or what that
            depends on.
        UnsafeError: the layout has a name that cannot be a file's.
        UnsupportedError: the format has no place for something (see `require_place`), or its
            reader would give it back otherwise (see `rehearse`).
        UsageError: one file would take the name of a bucket.
        CorruptError: the source is damaged, or the proof failed.
        NotFoundError: what the source's tensors are decoded from is missing.
        FtckptError: what `check` found, by its exit code.
        IncompleteError: the source changed meanwhile.
        NoResourceError, DeniedError, UnavailableError: the place could not be written.
    """

    def carry_out(
        options: TransferOptions, *, once: bool = False, proven: bool = False
    ) -> TransferReport:
        return _carry_out(
            content, layout, destination, target, single=single, same_objects=same_objects,
            options=options, store_options=store_options, check=check, prover=prover, parts=parts,
            once=once, proven=proven,
        )  # fmt: skip

    once = options.proof and prover is prove and parts is None and _is_plain(content, options)
    proven = parts is None and content.checkpoint.decoding.proves_reads
    try:
        return carry_out(options, once=once, proven=proven)
    except MisreadError:
        # Read wrongly once and rightly then: what was built of it is wrong.
        return carry_out(replace(options, restart=True))
    except CorruptError:
        if not proven or check is None:
            raise
        # The check reads all of it and names what is damaged, or it was read wrongly once.
        return carry_out(replace(options, restart=True))


class MisreadError(FtckptError):
    """Bytes of the source came otherwise for the transfer than for its check."""


def _is_plain(content: Content, options: TransferOptions) -> bool:
    """Say whether tensors lie in the source as they are, and this process alone reads them."""
    work = options.work
    alone = options.device == "cpu" and work.executor is None and work.division is None
    return alone and content.checkpoint.is_plain


def _carry_out(
    content: Content,
    layout: Layout,
    destination: str,
    target: Format,
    *,
    single: bool,
    same_objects: SameObjects,
    options: TransferOptions,
    store_options: StoreOptions,
    check: SourceCheck | None,
    prover: Prover,
    parts: BuiltByParts | None,
    once: bool,
    proven: bool,
) -> TransferReport:
    """Do what `transfer` says; `once`: by one reading of the source; `proven`: that is proven.

    Raises:
        MisreadError: the source was read wrongly, and is whole.
    """
    started = time.monotonic()
    source = content.checkpoint
    held = layout.content or content
    layout, staging = _placed(content, layout, destination, store_options, single=single)
    work = options.work
    sums: SourceSums | None = None
    gathering: Gatherer | None = None
    commit = commit_bytes(layout.commit)
    count = len(layout.files) + len(commit)
    try:
        plan = fingerprint(source, layout)
        sizes = {file.path: file.size for file in (*layout.files, *layout.commit)}
        if staging.begin(plan, sizes, restart=options.restart):
            return TransferReport(
                destination, target.name, count, layout.nbytes, layout.nbytes, already_there=True
            )
        if parts is not None:
            staging.believe(parts.blocks, parts.place)
        with blaming_changes(source):
            seen = SeenBytes(source) if (once or proven) and check is not None else None
            extra = 0
            if check is not None:
                checked = check(seen)
                require_sound(checked)
                extra += checked.bytes_read
            if options.proof and prover is prove:
                from ftckpt.transfer.prove.rehearsal import rehearse

                rehearse(content, layout, target, same_objects, single=single)
            sums = SourceSums(held, seen) if once else None
            gathering = _gatherer(source, options.device, layout, work.limiter, sums)
            built = _build(source, layout, gathering, staging, work, sums)
            if sums is not None:
                extra += _read_the_rest(sums, gathering, work)
            elif seen is not None:
                seen.end()
        gathering.close()  # what it keeps is memory that the proof needs
        written = time.monotonic()
        with blaming_changes(source):
            if seen is not None and check is not None:
                with forgetting_failures(staging):
                    checked = check(seen)
                    require_sound(checked)
                extra += checked.bytes_read - seen.taken
                if seen.differing:
                    staging.forget()
                    raise MisreadError(f"{seen.differing[0]} was read wrongly once")
            result = target.open(staging.source(commit))
            proof = None
            if options.proof:
                known = None if parts is None else parts.known
                how = replace(work, division=known)
                with forgetting_failures(staging):
                    if sums is None:
                        proof = prover(held, result, same_objects, how)
                    else:
                        proof = prove(held, result, same_objects, how, sums)
        for one in (source, *source.made_from):
            changes.require_unchanged(one.source, one.members())
        small = [digest_of_bytes(path, data) for path, data in commit.items()]
        manifest = replace(
            manifest_of(result, [*built.digests, *small], proven=proof is not None),
            # What is made of weights alone is weights alone: no run goes on from it either.
            thinned=options.thinned or thinned_from(source.source),
        )
        staging.publish(commit, manifest.dump())
        return TransferReport(
            destination,
            target.name,
            count,
            layout.nbytes,
            built.taken_over,
            proof=proof,
            extra_read=extra + (proof.source_bytes if proof is not None else 0),
            seconds={"write": written - started, "prove": time.monotonic() - written},
            manifest=manifest,
        )
    except NoResourceError:
        if options.thinned is not None:
            with suppress(OSError):
                staging.forget()
        raise
    finally:
        if gathering is not None:
            gathering.close()
        staging.close()


def _read_the_rest(sums: SourceSums, gathering: Gatherer, work: Work) -> int:
    """Read what was not read for the writing, because an earlier run had made it; return bytes."""

    def read(extent: Extent) -> ReadForProof:
        gathering.bytes.read(extent.file, extent.offset, buffer(extent.length, _SUM_SLOT))
        return sums.drain()

    places = [
        Extent(file, at, min(_CHUNK, offset + length - at))
        for file, offset, length in sums.missing()
        for at in range(offset, offset + length, _CHUNK)
    ]
    for made in work.run(places, read):
        sums.take(made)
    sums.end()
    return sum(place.length for place in places)


def transfer_share(
    content: Content,
    layout: Layout,
    destination: str,
    *,
    single: bool,
    options: TransferOptions,
    store_options: StoreOptions,
    check: Callable[[], object],
    share: FilesOfPart,
) -> None:
    """Build some files of a result beside other parts; nothing becomes visible.

    `check` verifies a share of the source first; `share` says which files, and is told of them. The
    other arguments are as in `transfer`.

    Raises:
        FtckptError: see `transfer`.
    """
    source = content.checkpoint
    layout, staging = _placed(content, layout, destination, store_options, single=single)
    gathering = _gatherer(source, options.device, layout, options.work.limiter)
    try:
        sizes = {file.path: file.size for file in (*layout.files, *layout.commit)}
        place = staging.join(fingerprint(source, layout), sizes, share.part)
        if not share.needed():
            return
        with blaming_changes(source):
            check()
            mine = replace(layout, files=[file for file in layout.files if share.takes(file)])
            built = _build(source, mine, gathering, staging, options.work)
        changes.require_unchanged(source.source, source.members())
        share.keep(built, place)
    finally:
        gathering.close()
        staging.close()


def prove_share(
    content: Content,
    layout: Layout,
    destination: str,
    target: Format,
    *,
    single: bool,
    same_objects: SameObjects,
    options: TransferOptions,
    store_options: StoreOptions,
    prover: Prover = prove,
) -> Mapping[str, str]:
    """Prove a share of a result that parts have built, as the work's division says.

    Returns:
        Marks of the files, as they were before they were read (see `staging.marks`).

    Raises:
        CorruptError: it is not what was to be written (`failed-proof`).
        FtckptError: it could not be read.
    """
    from .staging.lock import marks_of

    held = layout.content or content
    layout, staging = _placed(content, layout, destination, store_options, single=single)
    with blaming_changes(content.checkpoint):
        made = staging.source(commit_bytes(layout.commit))
        marks = marks_of(staging.built, [file.path for file in layout.files])
        prover(held, target.open(made), same_objects, options.work)
    return marks


@dataclass(frozen=True)
class BuiltByParts:
    """What parts have built in a staging place.

    Attributes:
        blocks: of files.
        place: what the place is called.
        known: knows what parts have proven.
    """

    blocks: Sequence[BlockMade]
    place: str
    known: Division | None


@dataclass(frozen=True)
class FilesOfPart:
    """The files of a result that one part builds.

    Attributes:
        part: which, in a word.
        takes: says whether a file is its.
        needed: asked when no other process can do the same part: whether there is something to do.
        keep: told of what was built, and what the place is called, while no other can do the same.
    """

    part: str
    takes: Callable[[OutputFile], bool]
    needed: Callable[[], bool]
    keep: Callable[[Built, str], None]


def _placed(
    content: Content,
    layout: Layout,
    destination: str,
    store_options: StoreOptions,
    *,
    single: bool,
) -> tuple[Layout, Staging]:
    """Return the layout with its last names, and where it is built."""
    require_place(layout)
    source = content.checkpoint
    source.decoding.bases()  # opens them
    store = open_store(destination, store_options)
    require_apart_from_all(source, store)
    staging = staging_at(store, destination, store_options, single=single)
    if single:  # a file is called as the user calls it
        (file,) = layout.files
        name = basename(absolute(store)) if store.traits.local else name_of(destination)
        layout = replace(layout, files=(OutputFile(name, file.segments),))
    require_names(layout)
    return layout, staging


def _build(
    source: Checkpoint,
    layout: Layout,
    gathering: Gatherer,
    staging: Staging,
    work: Work,
    sums: SourceSums | None = None,
) -> Built:
    depths = depths_of(source)
    ordered = in_order(layout, depths)
    places = of_layout(ordered, source)
    written_so_far = Written(ordered, source, staging.peek)
    with (
        source.decoding.reusing(written_so_far.look),
        reading_ahead(source, places, work.limiter, jobs=work.threads),
    ):
        if sums is not None:
            sums.begin()
        return build(ordered, gathering, staging, work, depths=depths, sums=sums)


def _gatherer(
    source: Checkpoint,
    device: str,
    layout: Layout,
    limiter: RateLimit | None,
    sums: SourceSums | None = None,
) -> Gatherer:
    if device == "cpu":
        return Gatherer(source, limiter, sums)
    from .device import gatherer

    return gatherer(source, device, layout, limiter)


def staging_at(
    store: Store, destination: str, store_options: StoreOptions, *, single: bool
) -> Staging:
    """Return where a result is built; `store` is opened at the destination."""
    if store.traits.local:
        from ftckpt.transfer.staging.local import LocalStaging

        return LocalStaging(absolute(store), single=single)
    if not single:
        from ftckpt.transfer.staging.remote import RemoteStaging

        return RemoteStaging(store)
    from ftckpt.transfer.staging.remote import StagedObject

    name, beside = name_of(destination), around(destination.rstrip("/"))
    staged = open_store(beside + staging_name(name), store_options)
    return StagedObject(open_store(beside, store_options), name, staged)


@contextmanager
def forgetting_failures(staging: Staging) -> Iterator[None]:
    """Remove what was built where proof or source fails: no run can go on from it."""
    try:
        yield
    except (CorruptError, UnverifiedError):
        staging.forget()
        raise


def require_sound(report: VerifyReport) -> None:
    """Go on only from a source that has passed.

    Raises:
        FtckptError: what was found, by its exit code.
    """
    if report.code is ExitCode.OK:
        return
    raise error_of(
        report.code,
        f"nothing was written: {report.message}",
        hint=report.hint or "ftckpt verify SRC says more; --no-proof carries it over as it is",
    )


def require_place(layout: Layout) -> None:
    """Refuse a layout that leaves something out: only the user may say that it is not needed.

    Raises:
        UnsupportedError: with the names.
    """
    left = layout.unplaced
    if left:
        raise UnsupportedError(
            f"the target has no place for {listed(left)}",
            hint="--drop NAME leaves it out; --only model writes the weights alone",
        )


def blaming_changes(source: Checkpoint) -> AbstractContextManager[None]:
    """Say of a failure that the source is still being written, where it has changed meanwhile.

    Raises:
        IncompleteError: it has; whatever else was found in it is not known to be so.
    """
    return changes.blamed(source.source, source.members())


def manifest_of(result: Checkpoint, files: Iterable[FileDigest], *, proven: bool) -> Manifest:
    """Return the manifest of a result that is about to be shown.

    Args:
        result: opened where it was built.
        files: what is known of its files.
        proven: whether it was compared with what was to be written.
    """
    now = utc_now()
    checks = (PassedCheck("structure", "none", now),) if proven else ()
    topology = result.topology
    return Manifest(
        format=result.format,
        step=result.step,
        topology=Topology(topology.world_size, topology.tp, topology.pp, topology.dp, topology.ep),
        files=sorted(files, key=lambda file: file.path),
        checks=checks,
        tool=f"ftckpt {__version__}",
        created=now,
    )
