"""Make and mend replicas of checkpoints: `copy`, `sync`, `repair`."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from ftckpt import amounts
from ftckpt.errors import ExitCode, NotFoundError, RefusedError, UsageError
from ftckpt.observer import SILENT, Observer
from ftckpt.progress import Counter
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work

from .definition import argument, operation, option, switch
from .many import ALONE, Machines, Session
from .opening import STORES, Also, Source, opened

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.discovery.roots import Root
    from ftckpt.findings import Finding
    from ftckpt.replication.copy import CopyReport
    from ftckpt.replication.options import ReplicationOptions
    from ftckpt.replication.repair import RepairReport
    from ftckpt.replication.sync import SyncReport

# Requests to an object store have a latency to hide, whatever processors there are.
_REQUESTS = 8

_HOW = "How it is done"
NoProof = Annotated[bool, switch("--no-proof", "Skip reading back the result.", under=_HOW)]
Afresh = Annotated[bool, switch("--restart", "Discard what another run to DST left.", under=_HOW)]
Blocks = Annotated[
    int,
    option(
        "N", "Blocks in flight; 0: one a processor, 8 to or from an object store.",
        "--jobs", "-j", min=0, under=_HOW,
    ),
]  # fmt: skip
Rate = Annotated[
    amounts.Rate, option("RATE", "Read no faster: 200MiB/s.", "--limit-rate", under=_HOW)
]
Memory = Annotated[amounts.Size, option("SIZE", "Memory limit.", "--max-memory", under=_HOW)]


@operation(
    examples=(
        ("ftckpt copy /nvme/run7/step-1000 /shared/run7/", "as /shared/run7/step-1000"),
        ("ftckpt copy run7@latest s3://bucket/run7/", "the newest of a root, to an object store"),
        ("ftckpt copy s3://bucket/run7/step-1000 step-1000", "and back"),
        ("ftckpt copy /n0/step-9 s3://b/run/ --also /n1/step-9", "gathered from two nodes' disks"),
        ("ftckpt copy hot:run7/step-1000 cold:run7/", "between two services: named remotes"),
        ("ftckpt copy run7/step-1200 s3://bucket/run7/ --include-bases", "a delta with its bases"),
        ("srun ftckpt copy /a/step-9 /b/ --part auto --finish-last", "by all nodes of a job"),
    ),
    codes={
        ExitCode.OK: "copied, proven and visible; or the same checkpoint was there already",
        ExitCode.CORRUPT: "the source is damaged, or what is there already; nothing new is visible",
        ExitCode.INCOMPLETE: "the source is not committed, or changed meanwhile; parts are missing",
        ExitCode.UNSAFE: "a file that is not regular, or hostile content; nothing was executed",
        ExitCode.REFUSED: "DST holds something else or lies in a checkpoint, or is being written",
        ExitCode.NOT_FOUND: "no checkpoint there, or DST looks like a mistyped URL",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "disk full or memory budget too small; run it again to go on",
        ExitCode.UNSUPPORTED: "",
    },
    everyday=("--jobs", "--limit-rate", "--also", "--include-bases"),
)
def copy(
    source: Source,
    destination: Annotated[
        str, argument("DST", "Where the copy goes; DIR/ keeps the name of SRC.")
    ],
    *,
    also: Also = (),
    include_bases: Annotated[
        bool, switch("--include-bases", "Also copy a delta's bases, before it and beside it.")
    ] = False,
    unmanaged: Annotated[
        bool, switch("--unmanaged", "Also copy files that do not belong to the checkpoint.")
    ] = False,
    no_proof: NoProof = False,
    restart: Afresh = False,
    jobs: Blocks = 0,
    limit_rate: Rate = "",
    max_memory: Memory = "1GiB",
    division: Machines = ALONE,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> CopyReport:
    """Copy a checkpoint between tiers: verified, resumable.

    Every byte is read once, hashed, and compared with the manifest of SRC, or with the CRC-32s in
    its files; then the copy is read back. Nothing is overwritten: where the same checkpoint stands
    already, that is the answer. A checkpoint without a manifest gets one at DST.

    Raises:
        CorruptError: the source is damaged, or what stands there already, or the proof failed.
        ExistsError: something else stands at the destination.
        RefusedError: it lies inside a checkpoint, or another run is writing there.
        IncompleteError: the source is not committed, or changed meanwhile.
        UsageError: a root, not one checkpoint.
    """
    from ftckpt.replication.copy import CopiedBase
    from ftckpt.replication.copy import copy as copied
    from ftckpt.replication.existing_destination import destination_of, is_local

    checkpoint = opened(source, stores, on, also=also)
    destination = destination_of(checkpoint.source, destination)
    if on is not SILENT:  # finding a step may read files
        on.report(destination=destination, step=checkpoint.known_step)
    options = _options(
        jobs, limit_rate, near=checkpoint.source.store.traits.local,
        writes_local=is_local(destination, stores), proof=not no_proof, restart=restart,
        beside=unmanaged, counter=on.counter,
    )  # fmt: skip
    if division.asked:
        if include_bases:
            raise UsageError("--include-bases copies several checkpoints: run each with --part")
        from .many.copying import DividedCopy

        session = Session("copy", division, stores, on)
        done: CopyReport = DividedCopy(session, checkpoint, destination, options).run()
        return done
    made = []
    for base, place in _bases_beside(checkpoint, destination, on) if include_bases else ():
        one = copied(base, place, options=options, stores=stores)
        on.end(one)
        made.append(CopiedBase(one.url, one.already_there))
    report = copied(checkpoint, destination, options=options, stores=stores)
    return replace(report, bases=made)


def _bases_beside(
    checkpoint: Checkpoint, destination: str, on: Observer
) -> list[tuple[Checkpoint, str]]:
    """Return what a delta depends on, the full checkpoint first, and where each goes: beside it.

    A reader looks for a base where it was, seen from the delta, and then among its siblings.
    Nothing for a full checkpoint.

    Raises:
        FtckptError: a base is missing, wrong, or cannot be opened.
    """
    from ftckpt.formats.delta.chain import chain
    from ftckpt.formats.delta.checkpoint import DeltaCheckpoint
    from ftckpt.replication.existing_destination import destination_of
    from ftckpt.transfer.places import around

    if not isinstance(checkpoint, DeltaCheckpoint):
        on.note("no delta: it has no bases")
        return []
    beside = around(destination) or "./"
    return [(base, destination_of(base.source, beside)) for base in reversed(chain(checkpoint)[1:])]


def _options(
    jobs: int,
    limit_rate: amounts.Rate,
    *,
    near: bool,
    writes_local: bool,
    proof: bool,
    restart: bool,
    beside: bool = False,
    counter: Counter,
) -> ReplicationOptions:
    """Return how a replica is made, with as many blocks in flight as memory allows.

    Args:
        jobs: blocks in flight; 0 for as many as are good.
        limit_rate: bytes a second.
        near: whether everything that is read is on this machine.
        writes_local: whether the replica is.
        proof: whether the result is read back.
        restart: whether what an earlier run has left is forgotten.
        beside: whether files that do not belong to the checkpoint are carried too.
        counter: is told of bytes read, carried and proven.

    Raises:
        UsageError: a rate that is none.
        NoResourceError: the memory budget does not hold one block.
    """
    from ftckpt.replication.options import ReplicationOptions
    from ftckpt.transfer.request.dry_run import affordable_jobs
    from ftckpt.workers import limits

    wanted = jobs or max(limits.jobs(), 0 if near and writes_local else _REQUESTS)
    work = Work.of(affordable_jobs(wanted, local=writes_local), limit_rate, counter)
    return ReplicationOptions(replace(work, processes=0), proof, restart, beside)


@operation(
    examples=(
        ("ftckpt sync /nvme/run7 s3://bucket/run7 --newest 3", "the last few, to durable storage"),
        (
            "ftckpt sync /ckpt/run7 cold:run7 --every 1000 --tag release",
            "milestones, to another service (named remotes)",
        ),
        (
            "ftckpt sync /nvme/run7 /shared/run7 --limit-rate 500MiB/s -q",
            "beside a trainer, from cron",
        ),
        ("ftckpt sync /nvme/run7 s3://bucket/run7 --dry-run", "what it would ship, and the lag"),
    ),
    codes={
        ExitCode.OK: "the tier holds all that was chosen; saves in flight wait for the next run",
        ExitCode.CORRUPT: "a checkpoint, or its copy, is damaged; the others were shipped",
        ExitCode.INCOMPLETE: "a checkpoint changed while it was read; the others were shipped",
        ExitCode.UNSAFE: "hostile content in a checkpoint; the others were shipped",
        ExitCode.REFUSED: "another sync is at work on DST, or another checkpoint has the name",
        ExitCode.NOT_FOUND: "no such root, or DST is a directory that does not exist",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "disk full or memory budget too small; run it again to go on",
        ExitCode.UNSUPPORTED: "a checkpoint that cannot be copied; the others were shipped",
    },
    everyday=("--newest", "--every", "--tag", "--limit-rate", "--dry-run"),
)
def sync(
    root: Annotated[str, argument("ROOT", "Directory or URL that holds the checkpoints.")],
    destination: Annotated[str, argument("DST", "The tier: a directory that exists, or a URL.")],
    *,
    every: Annotated[
        int | None, option("STEPS", "The nearest to each multiple of STEPS, as in gc.", min=1)
    ] = None,
    newest: Annotated[int | None, option("N", "The N newest, by step and by time.", min=1)] = None,
    tag: Annotated[Sequence[str], option("TAG", "Checkpoints with the tag. Repeatable.")] = (),
    again: Annotated[bool, switch("--again", "Ship again what gc at DST has dropped.")] = False,
    dry_run: Annotated[
        bool, switch("--dry-run", "Show what would be shipped; write nothing.")
    ] = False,
    no_proof: NoProof = False,
    restart: Afresh = False,
    jobs: Blocks = 0,
    limit_rate: Rate = "",
    max_memory: Memory = "1GiB",
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> SyncReport:
    """Ship the checkpoints of a root to another tier, oldest first.

    Without a rule every committed checkpoint is shipped; several rules add up. Each copy is made
    as ftckpt copy makes it: verified, resumable, visible at the end. Nothing is overwritten or
    removed on either side. A damaged checkpoint is named and does not hold up the others.

    Returns:
        Each checkpoint with what became of it, and the worst code.

    Raises:
        NotFoundError: no such root, or a directory that does not exist.
        UsageError: one checkpoint of a root is selected, or the tier is one.
        RefusedError: the tier lies at the root or in it, or another sync is at work on it.
        NoResourceError, DeniedError, UnavailableError: a side could not be read or written.
    """
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.formats.delta.bases import bases
    from ftckpt.replication.sync import SyncOptions
    from ftckpt.replication.sync import sync as ship
    from ftckpt.retention.policy import Policy
    from ftckpt.retention.records.who import actor
    from ftckpt.retention.scan.entry import ScanOptions

    on.report(target=root)
    source, tier = _source_root(root, stores), _tier_at(destination, stores)
    _require_apart(source, tier)
    on.report(destination=destination, dry_run=dry_run)
    policy = None
    if every or newest or tag:
        policy = Policy(keep_every=every, keep_last=newest, keep_tags=tuple(tag))
    replication = _options(
        jobs, limit_rate, near=source.store.traits.local, writes_local=tier.store.traits.local,
        proof=not no_proof, restart=restart, counter=on.counter,
    )  # fmt: skip
    options = SyncOptions(policy, replication, stores, dry_run=dry_run, again=again, actor=actor())
    how = ScanOptions(FORMATS, time.time(), bases=bases)

    def remark(text: str) -> None:
        on.note(f"no lock: {text}")

    return ship(source, tier, how, options, told=on.end, remark=remark)


def _source_root(path: str, stores: StoreOptions) -> Root:
    """Return the root that `sync` ships from.

    Raises:
        NotFoundError: nothing is there.
        UsageError: one checkpoint of a root is selected.
    """
    from ftckpt.discovery.resolve import locate, open_root
    from ftckpt.formats.catalog import FORMATS

    place = locate(path, stores)
    if place.which:
        raise UsageError(
            f"{path} selects one checkpoint of a root", hint="ftckpt copy ships a single one"
        )
    return open_root(place, FORMATS)


def _tier_at(url: str, stores: StoreOptions) -> Root:
    """Return the tier as it is; a prefix of an object store need not hold anything yet.

    Raises:
        NotFoundError: a directory that does not exist: it may be a mount that is gone.
        UsageError: it is a file or a checkpoint.
    """
    from ftckpt.discovery.listing import recognise_at
    from ftckpt.discovery.roots import Root, read_again
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.storage import open_store
    from ftckpt.storage.store import Entry, EntryKind

    store = open_store(url.rstrip("/") or url, stores)

    def ask(entry: Entry) -> object:
        return recognise_at(store, entry, FORMATS)

    empty = Root(store, "", (), (), (), ask, {})  # type: ignore[arg-type]
    try:
        found = store.stat("")
        if found.kind is not EntryKind.DIRECTORY:
            raise UsageError(f"{url} is a file, not a directory of checkpoints")
        if recognise_at(store, found._replace(path=""), FORMATS) is not None:
            raise UsageError(f"{url} is a checkpoint, not a directory of checkpoints")
        return read_again(empty)
    except NotFoundError as error:
        if store.traits.local:
            error.hint = error.hint or "make the directory, if no mount is missing"
            raise
        return empty


def _require_apart(source: Root, tier: Root) -> None:
    """Refuse a tier that is the root, lies inside it, or around it.

    Raises:
        RefusedError: one of them.
    """

    def place(root: Root) -> str:
        local = root.store.local_path(root.base)
        return root.store.identity(root.base) if local is None else os.path.realpath(local)

    here, there = place(source).rstrip("/") + "/", place(tier).rstrip("/") + "/"
    if here.startswith(there) or there.startswith(here):
        raise RefusedError(
            f"{tier.url} and {source.url} are not apart from each other",
            hint="a tier is another place than the root",
        )


@operation(
    examples=(
        (
            "ftckpt repair /ckpt/step-1000 --from s3://run7/ckpt/step-1000",
            "fetch the bad blocks only",
        ),
        (
            "ftckpt repair /ckpt/step-1000 --from /shared/step-1000 --dry-run",
            "list them, fetch none",
        ),
        ("ftckpt repair /ckpt/step-1000", "fetch them from its own copy-0, copy-1, …"),
        (
            "ftckpt repair s3://run7/ckpt/step-1000 --from /ckpt/step-1000 --to s3://run7/ckpt/mended",
            "in an object store the mended checkpoint gets a name of its own",
        ),
        (
            "srun ftckpt repair /ckpt/step-9 --from /b/step-9 --part auto --finish-last",
            "all nodes of a job look for the damage, and the last one mends it",
        ),
    ),
    codes={
        ExitCode.OK: "mended and in place, or there already; or nothing was wrong; or --dry-run",
        ExitCode.CORRUPT: "a block is damaged in both; nothing has changed",
        ExitCode.INCOMPLETE: "one of the two changed meanwhile; parts are missing",
        ExitCode.UNVERIFIED: "neither is sealed, and nothing says which of two bytes is right",
        ExitCode.UNSAFE: "a file that is not regular, or hostile content; nothing was executed",
        ExitCode.REFUSED: "a replica of another checkpoint, another run at it, or DST is taken",
        ExitCode.NOT_FOUND: "one of the two is not there",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "disk full or memory budget too small; run it again to go on",
        ExitCode.UNSUPPORTED: "the filesystem cannot swap two names; --to writes elsewhere",
    },
    everyday=("--from", "--to", "--dry-run"),
)
def repair(
    path: Annotated[str, argument("PATH", "The damaged checkpoint: path, URL or ROOT@STEP.")],
    replica: Annotated[
        str,
        option(
            "REPLICA",
            "Another copy of the same checkpoint; without it, the copies that PATH keeps"
            " itself (copy-0, copy-1).",
            "--from",
        ),
    ] = "",
    *,
    to: Annotated[
        str, option("DST", "Write the repaired checkpoint there; DIR/ keeps its name.")
    ] = "",
    dry_run: Annotated[
        bool, switch("--dry-run", "List the damage; fetch and write nothing.")
    ] = False,
    no_proof: NoProof = False,
    restart: Afresh = False,
    jobs: Blocks = 0,
    limit_rate: Rate = "",
    max_memory: Memory = "1GiB",
    division: Machines = ALONE,
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> RepairReport:
    """Repair a damaged checkpoint with the blocks of a replica.

    Blocks are compared with the manifest of PATH, or of REPLICA where PATH has none that can be
    read; those that are wrong or missing are fetched, checked, and built into a new copy that takes
    the name of PATH in one act. The damaged one is kept in .ftckpt/damaged beside it.

    Raises:
        CorruptError: a block is damaged in both.
        RefusedError: the replica is of another checkpoint.
        UnverifiedError: nothing says which of two bytes is right.
        UsageError: it lies in an object store and `to` is not given; or no `replica`, and it
            keeps no copies.
    """
    from ftckpt.discovery.resolve import files_at, open_source
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.replication.damage import diagnose
    from ftckpt.replication.existing_destination import is_local
    from ftckpt.replication.repair import manifest_for_parts, settle
    from ftckpt.replication.repair import repair as repaired

    on.report(target=path, replica=replica)
    settle(files_at(path, FORMATS, stores))
    damaged = files_at(path, FORMATS, stores)  # as it is now
    other = files_at(replica, FORMATS, stores) if replica else None
    local = damaged.store.traits.local
    options = _options(
        jobs, limit_rate, near=local and (other or damaged).store.traits.local,
        writes_local=is_local(to, stores) if to else local, proof=not no_proof, restart=restart,
        counter=on.counter,
    )  # fmt: skip
    from_source = partial(open_source, formats=FORMATS)
    if other is None:
        if division.asked:
            raise UsageError("--part needs --from: parts compare with one replica")
        from ftckpt.replication.own_copies import repair_from_own_copies

        return repair_from_own_copies(
            damaged, opened=from_source, to=to, dry_run=dry_run, options=options, stores=stores
        )

    def whole(looking: Work) -> RepairReport:
        return repaired(
            damaged, other, opened=from_source, to=to, dry_run=dry_run, options=options,
            stores=stores, looked_by=looking.division,
        )  # fmt: skip

    if not division.asked:
        return whole(options.work)
    from ftckpt.parts.plan import plan_of_files
    from ftckpt.parts.shares import FilesAlone

    from .many.run import Divided

    manifest = manifest_for_parts(damaged, other, opened=from_source, work=options.work)

    def share(work: Work) -> tuple[Sequence[Finding], int]:
        return (), diagnose(damaged, manifest, work).nbytes

    plan = plan_of_files(damaged, "repair", {"to": to, "dry_run": dry_run}, manifest, other)
    session, names = Session("repair", division, stores, on), [f.path for f in manifest.files]
    files = FilesAlone(damaged, {})
    done: RepairReport = Divided(session, files, plan, names, options.work, share, whole).run()
    return done
