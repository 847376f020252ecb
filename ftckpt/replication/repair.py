"""Mend a damaged checkpoint: good blocks stay, bad ones come from a replica, digests judge both.

The damaged checkpoint is never written. The mended one is built beside it and takes its name in one
act; or, where names cannot be swapped (in an object store) or on demand, it is built elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from shlex import quote
from typing import ClassVar

from ftckpt.errors import (
    CorruptError,
    ExistsError,
    IncompleteError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ftckpt.extents import BLOCK
from ftckpt.findings import counted
from ftckpt.manifest import Manifest
from ftckpt.own_files import MANIFEST
from ftckpt.progress import expect_files
from ftckpt.reports import said_as
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.source import Source
from ftckpt.transfer.layout import Layout
from ftckpt.transfer.places import name_of, place_of, require_names, require_outside
from ftckpt.transfer.request.example import blamed, require_unchanged
from ftckpt.transfer.staging import Staging
from ftckpt.workers import Division, Work

from .carry_files import CopiedFile, DamagedBlock, Moved, Mover, Origin
from .copy import prove, times
from .damage import BadBlock, Diagnosis, diagnose
from .existing_destination import (
    destination_of,
    plan_of,
    renamed,
    require_apart_from_bases,
    require_other,
    require_same,
    staging_at,
)
from .options import ReplicationOptions
from .swap_in_place import ExchangeStaging
from .trusted_manifest import (
    Authority,
    ManifestEvidence,
    Open,
    authority,
    require_alike,
    require_explained,
    require_one_save,
)

_OPTIONS = ReplicationOptions()
_STORES = StoreOptions()


@dataclass(frozen=True)
class RepairReport:
    """What was wrong, and what was done about it.

    Attributes:
        url: where the mended checkpoint stands; the damaged one's place where nothing was done.
        evidence: what says which bytes are right: `manifest` or `crc32`.
        blocks: what is or was wrong.
        long: files with bytes behind their end.
        manifest: whether there was a manifest that could not be read.
        fetched: bytes that came from the replica.
        files: files that were written.
        nbytes: bytes of them.
        kept: where the damaged checkpoint is now; "" where it has not moved.
        proven: whether what was written was read back.
        taken_over: bytes that an earlier, killed run had written.
        done: whether the mended checkpoint is visible; False where nothing had to be done, or
            nothing was to be done.
        already_there: whether it stood at another place before, whole.
        seconds: how long each stage took.
    """

    SAID: ClassVar = ("bytes_damaged",)

    url: str = field(metadata=said_as("destination"))
    evidence: str
    blocks: Sequence[BadBlock]
    long: Sequence[str] = field(metadata=said_as("long_files"))
    manifest: bool = field(metadata=said_as("manifest_damaged"))
    fetched: int = 0
    files: int = 0
    nbytes: int = field(default=0, metadata=said_as("bytes"))
    kept: str = ""
    proven: bool = False
    taken_over: int = 0
    done: bool = False
    already_there: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def bytes_damaged(self) -> int:
        """Bytes of the bad blocks."""
        return sum(block.length for block in self.blocks)

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.blocks or self.long or self.manifest)


def repair(
    source: Source,
    replica: Source,
    *,
    opened: Open,
    to: str = "",
    dry_run: bool = False,
    options: ReplicationOptions = _OPTIONS,
    stores: StoreOptions = _STORES,
    looked_by: Division | None = None,
) -> RepairReport:
    """Mend a checkpoint from a replica.

    Which bytes are right is said by the manifest: the checkpoint's own, else the replica's.

    Args:
        source: the damaged checkpoint, listed; it need not open. `settle` comes before.
        replica: another copy of it, listed; it may be damaged in other blocks.
        opened: opens either, to know which step it is.
        to: path or URL of the mended checkpoint, `DIR/` for its own name in DIR; "" for the place
            of the damaged one.
        dry_run: look for damage, and do no more.
        options: how.
        stores: how to reach object stores.
        looked_by: knows what parts have found in blocks.

    Raises:
        RefusedError: the replica is of another checkpoint, another run is at it, or `to` lies
            inside a checkpoint.
        ExistsError: something else stands at `to`.
        CorruptError: a block is damaged in both; the message names the first.
        UnverifiedError: nothing says which of two bytes is right.
        UsageError: the names of an object store cannot be swapped, and `to` is not given.
        IncompleteError: one of the two changed meanwhile.
        UnsupportedError: the filesystem cannot swap names.
        NoResourceError, DeniedError, UnavailableError: it could not be read or written.
    """
    local = source.store.traits.local
    if not (local or to or dry_run):
        raise UsageError(
            f"{source.url} lies in an object store, where no name is given to other bytes",
            hint="--to DST writes the mended checkpoint to another place",
        )
    if to:
        to = destination_of(source, to)
        require_other(source, to, stores)
        place = open_store(to, stores)
        require_outside(place)
        require_apart_from_bases(lambda: opened(source), place)
    began = time.monotonic()
    with blamed(replica, replica.entries), blamed(source, source.entries):
        known = authority(source, replica, opened, options.work)
    names = [file.path for file in known.manifest.files]
    with blamed(source, names):
        found = diagnose(source, known.manifest, replace(options.work, division=looked_by))
    if not known.own:
        require_alike(source, replica, found)
    if known.evidence != "manifest":
        require_explained(source, opened, found, options.work)
    elif not known.own and any(block.why == "differs" for block in found.blocks):
        require_one_save(source, replica, opened, options.work)
    report = RepairReport(source.url, known.evidence, found.blocks, found.long, known.damaged)
    if dry_run or (report.sound and not to):
        return report
    looked = time.monotonic()
    mending = _Mending.of(source, replica, known, found, to)
    require_names(Layout(files=[file.output for file in mending.files]))
    staging = staging_at(source, to, stores) if to else exchange_staging(source)
    try:
        sizes = {file.path: file.size for file in mending.files}
        there = replace(report, url=to, done=True, already_there=True)
        try:
            if staging.begin(mending.plan, sizes, restart=options.restart):
                return there
        except ExistsError as error:
            require_same(source, mending.manifest, to, stores, options, error)
            return there
        with blamed(replica, replica.entries), blamed(source, names):
            moved = _mend(mending, staging, options.work)
        written = time.monotonic()
        require_unchanged(source, names)
        _show(mending, staging, moved, options)
    except IncompleteError:
        staging.forget()
        raise
    finally:
        staging.close()
    return replace(
        report,
        url=to or source.url,
        fetched=found.bad_bytes,
        files=len(mending.files),
        nbytes=sum(sizes.values()),
        kept=staging.kept if isinstance(staging, ExchangeStaging) else "",
        proven=options.proof,
        taken_over=moved.taken_over,
        done=True,
        seconds={
            "look": looked - began,
            "write": written - looked,
            "prove": time.monotonic() - written,
        },
    )


def manifest_for_parts(source: Source, replica: Source, *, opened: Open, work: Work) -> Manifest:
    """Return the manifest by which parts look for damage.

    Raises:
        UnsupportedError: neither is sealed: then the replica is read as a whole.
        FtckptError: as `repair`.
    """
    sealed = any(one.single or MANIFEST in one.entries for one in (source, replica))
    known = authority(source, replica, opened, work) if sealed else None
    if known is None or known.evidence != "manifest":
        raise UnsupportedError(
            "neither of the two is sealed, and parts look for damage by a manifest",
            hint=f"ftckpt seal {quote(replica.url)}, or repair without --part",
        )
    return known.manifest


def exchange_staging(source: Source) -> ExchangeStaging:
    """Return what builds the mended checkpoint beside a damaged one of this machine.

    Raises:
        RefusedError: it is a link to a file, whose name and manifest are not the file's own.
    """
    if source.single and next(iter(source.entries.values())).link is not None:
        raise RefusedError(
            f"{source.url} is a link to a file", hint="name the file, or write elsewhere with --to"
        )
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return ExchangeStaging(place_of(source), single=source.single, time=now)


def settle(source: Source) -> None:
    """Finish a repair that was killed just after the names were swapped; before anything else.

    Raises:
        RefusedError: another run is at it.
    """
    linked = source.single and next(iter(source.entries.values())).link is not None
    if source.store.traits.local and not linked and not source.named:
        exchange_staging(source).settle()


@dataclass(frozen=True)
class _Mending:
    """What is to be built.

    Attributes:
        source: the damaged checkpoint.
        replica: the other.
        found: the damage.
        files: that are built anew.
        manifest: of the mended checkpoint, with the names that it gets.
        data: its bytes, b"" where it stands already.
    """

    source: Source
    replica: Source
    found: Diagnosis
    files: Sequence[CopiedFile]
    manifest: Manifest
    data: bytes

    @classmethod
    def of(
        cls, source: Source, replica: Source, known: Authority, found: Diagnosis, to: str
    ) -> _Mending:
        """Choose the files: all of them for another place, else those with damage."""
        name = name_of(to) if to and source.single else ""
        sealed = [file for file in known.manifest.files if to or file.path in found.files]
        files = [CopiedFile(name or file.path, file.path, file.size) for file in sealed]
        manifest = known.manifest
        if name:
            manifest = renamed(manifest, name)
        stands = known.own and source.single and not to
        return cls(source, replica, found, files, manifest, b"" if stands else manifest.dump())

    @property
    def plan(self) -> str:
        """Fingerprint of what decides the result.

        The replica does not: another one may go on where one was not enough.
        """
        single = self.source.single
        names = self.source.entries if single else [file.path for file in self.manifest.files]
        return plan_of(self.source, names, self.manifest.files)

    def origin(self, file: CopiedFile, number: int) -> Origin:
        """Return where a block is good."""
        if (file.name, number) not in self.found.places:
            return Origin(self.source.store, self.source.path(file.name))
        name = next(iter(self.replica.entries)) if self.replica.single else file.name
        return Origin(self.replica.store, self.replica.path(name))


def _mend(mending: _Mending, staging: Staging, work: Work) -> Moved:
    """Build the files.

    Raises:
        CorruptError: blocks are damaged in both; what could be built stays for another replica.
    """
    evidence = ManifestEvidence(mending.manifest)
    mover = Mover(staging, mending.origin, evidence, work, keep_going=True)
    moved = Moved()
    work.counter.start("mending", sum(file.size for file in mending.files))
    expect_files(work.counter, len(mending.files))
    mover.move(mending.files, moved)
    if moved.damage:
        raise _both(mending, moved.damage)
    return moved


def _both(mending: _Mending, damage: Sequence[DamagedBlock]) -> CorruptError:
    listed = [f"{d.path} block {d.number} ({d.error.message})" for d in sorted(damage)[:5]]
    more = f" and {len(damage) - 5} more" if len(damage) > 5 else ""
    first = min(damage, key=lambda d: (d.path, d.number))
    return CorruptError(
        f"{counted(len(damage), 'block')} cannot be had from {mending.replica.url} either: "
        f"{'; '.join(listed)}{more}",
        hint="nothing has changed; --from another replica goes on with what was found so far",
        kind="bad-digest",
        file=first.path,
        offset=first.number * BLOCK,
        length=first.length,
    )


def _show(mending: _Mending, staging: Staging, moved: Moved, options: ReplicationOptions) -> None:
    """Prove what was built, and make it visible."""
    staging.date(times(mending.replica, mending.files) | times(mending.source, mending.files))
    if isinstance(staging, ExchangeStaging) and not mending.source.single:
        staging.keep({file.path for file in mending.files})
    if staging.shows_before_proof:
        staging.publish({}, mending.data)
    if options.proof and mending.files:
        built = [mending.manifest.by_path[file.path] for file in mending.files]
        prove(staging.source({}), replace(mending.manifest, files=built), moved, options.work)
    if not staging.shows_before_proof:
        staging.publish({}, mending.data)
