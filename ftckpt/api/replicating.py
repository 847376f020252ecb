"""What makes and mends replicas: `copy`, `sync`, `repair`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Unpack

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import NotFoundError, RefusedError, UsageError
from ftckpt.progress import NULL, Counter
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work

from .opening import STORES, RunFlags, job_count, opened, rate_limit

if TYPE_CHECKING:
    from ftckpt.discovery.roots import Root
    from ftckpt.replication.copy import CopyReport
    from ftckpt.replication.options import ReplicationOptions
    from ftckpt.replication.repair import RepairReport
    from ftckpt.replication.sync import SyncItem, SyncReport

# Requests to an object store have a latency to hide, whatever processors there are.
_REQUESTS = 8


def copy(
    source: Checkpoint | str,
    destination: str,
    *,
    also: Sequence[str] = (),
    include_bases: bool = False,
    unmanaged: bool = False,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    **flags: Unpack[RunFlags],
) -> CopyReport:
    """Copy a checkpoint to another tier; see `ftckpt.replication.copy.copy`.

    Args:
        source: opened, or a path as `open_checkpoint` takes it.
        destination: path or URL of the copy; `DIR/` for its own name in DIR.
        also: directories with more files of the source (see `open_checkpoint`).
        include_bases: copy what a delta depends on first, beside it.
        unmanaged: copy files too that do not belong to the checkpoint.
        stores: how to reach object stores.
        counter: is told of the work.
        flags: see `RunFlags`.

    Raises:
        CorruptError: the source is damaged, or what stands there already, or the proof failed.
        ExistsError: something else stands at the destination.
        RefusedError: it lies inside a checkpoint, or another run is writing there.
        IncompleteError: the source is not committed, or changed meanwhile.
    """
    from ftckpt.replication.copy import copy as copied
    from ftckpt.replication.places import destination_of, is_local

    checkpoint = opened(source, stores, also=also)
    destination = destination_of(checkpoint.source, destination)
    options = replication_options(
        flags, near=checkpoint.source.store.traits.local,
        writes_local=is_local(destination, stores), beside=unmanaged, counter=counter,
    )  # fmt: skip
    for base, place in bases_beside(checkpoint, destination) if include_bases else ():
        copied(base, place, options=options, stores=stores)
    return copied(checkpoint, destination, options=options, stores=stores)


def bases_beside(checkpoint: Checkpoint, destination: str) -> list[tuple[Checkpoint, str]]:
    """Return what a delta depends on, the full checkpoint first, and where each goes: beside it.

    A reader looks for a base where it was, seen from the delta, and then among its siblings.
    Nothing for a full checkpoint.

    Raises:
        FtckptError: a base is missing, wrong, or cannot be opened.
    """
    from ftckpt.formats.delta.chain import chain
    from ftckpt.formats.delta.checkpoint import DeltaCheckpoint
    from ftckpt.replication.places import destination_of
    from ftckpt.transfer.places import around

    if not isinstance(checkpoint, DeltaCheckpoint):
        return []
    beside = around(destination) or "./"
    return [(base, destination_of(base.source, beside)) for base in reversed(chain(checkpoint)[1:])]


def replication_options(
    flags: RunFlags,
    *,
    near: bool,
    writes_local: bool,
    beside: bool = False,
    counter: Counter = NULL,
) -> ReplicationOptions:
    """Return how a replica is made, with as many blocks in flight as memory allows.

    Args:
        flags: how it is written.
        near: whether everything that is read is on this machine.
        writes_local: whether the replica is.
        beside: whether files that do not belong to the checkpoint are carried too.
        counter: is told of bytes read, carried and proven.

    Raises:
        UsageError: a rate that is none.
        NoResourceError: the memory budget does not hold one block.
    """
    from ftckpt.replication.options import ReplicationOptions
    from ftckpt.transfer.request.dry_run import affordable_jobs

    wanted = flags.get("jobs", 0) or max(job_count(0), 0 if near and writes_local else _REQUESTS)
    return ReplicationOptions(
        work=Work(
            threads=affordable_jobs(wanted, local=writes_local),
            limiter=rate_limit(flags.get("limit_rate", "")),
            counter=counter,
        ),
        proof=not flags.get("no_proof", False),
        restart=flags.get("restart", False),
        beside=beside,
    )


def sync(
    root: Root | str,
    destination: Root | str,
    *,
    every: int | None = None,
    newest: int | None = None,
    tag: Sequence[str] | None = None,
    again: bool = False,
    dry_run: bool = False,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    told: Callable[[SyncItem], None] = lambda _: None,
    remark: Callable[[str], None] = lambda _: None,
    **flags: Unpack[RunFlags],
) -> SyncReport:
    """Ship the checkpoints of a root to another tier, the oldest missing one first.

    Without a rule every committed checkpoint is shipped; several rules add up. What cannot be
    shipped does not hold up the others: the report has its code.

    Args:
        root: directory or URL that holds the checkpoints, or the root that is there.
        destination: the tier: a directory that exists, or a URL.
        every: the nearest to each multiple of this number of steps.
        newest: the N newest, by step and by time.
        tag: those with one of these tags.
        again: ship again what gc at the tier has dropped.
        dry_run: say what would be shipped; write nothing.
        stores: how to reach object stores.
        counter: is told of the work.
        told: is told each checkpoint as it is decided.
        remark: is told what else is to be known.
        flags: see `RunFlags`.

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

    source = source_root(root, stores) if isinstance(root, str) else root
    tier = tier_at(destination, stores) if isinstance(destination, str) else destination
    require_apart(source, tier)
    policy = None
    if every or newest or tag:
        policy = Policy(keep_every=every, keep_last=newest, keep_tags=tuple(tag or ()))
    replication = replication_options(
        flags, near=source.store.traits.local, writes_local=tier.store.traits.local,
        counter=counter,
    )  # fmt: skip
    options = SyncOptions(policy, replication, stores, dry_run=dry_run, again=again, actor=actor())
    how = ScanOptions(FORMATS, time.time(), bases=bases)
    return ship(source, tier, how, options, told=told, remark=remark)


def source_root(path: str, stores: StoreOptions) -> Root:
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


def tier_at(url: str, stores: StoreOptions) -> Root:
    """Return the tier as it is; a prefix of an object store need not hold anything yet.

    Raises:
        NotFoundError: a directory that does not exist: it may be a mount that is gone.
        UsageError: it is a file or a checkpoint.
    """
    from ftckpt.discovery.open_part import recognise_at
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


def require_apart(source: Root, tier: Root) -> None:
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


def repair(
    path: str,
    replica: str = "",
    *,
    to: str = "",
    dry_run: bool = False,
    stores: StoreOptions = STORES,
    counter: Counter = NULL,
    **flags: Unpack[RunFlags],
) -> RepairReport:
    """Repair a damaged checkpoint with the blocks of a replica.

    Args:
        path: the damaged one; it need not open.
        replica: another copy of it (the flag is `--from`); "" for the copies that it keeps itself.
        to: path or URL of the mended one; "" for the place of the damaged one.
        dry_run: look for damage, and do no more.
        stores: how to reach object stores.
        counter: is told of the work.
        flags: see `RunFlags`.

    Raises:
        CorruptError: a block is damaged in both.
        RefusedError: the replica is of another checkpoint.
        UnverifiedError: nothing says which of two bytes is right.
        UsageError: it lies in an object store and `to` is not given; or no `replica`, and it
            keeps no copies.
    """
    from functools import partial

    from ftckpt.discovery.resolve import files_at, open_source
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.replication.places import is_local
    from ftckpt.replication.repair import repair as repaired
    from ftckpt.replication.repair import settle

    settle(files_at(path, FORMATS, stores))
    damaged = files_at(path, FORMATS, stores)  # as it is now
    other = files_at(replica, FORMATS, stores) if replica else None
    local = damaged.store.traits.local
    options = replication_options(
        flags, near=local and (other or damaged).store.traits.local,
        writes_local=is_local(to, stores) if to else local, counter=counter,
    )  # fmt: skip
    opened = partial(open_source, formats=FORMATS)
    if other is None:
        from ftckpt.replication.own_copies import repair_from_own_copies

        return repair_from_own_copies(
            damaged, opened=opened, to=to, dry_run=dry_run, options=options, stores=stores
        )
    return repaired(
        damaged,
        other,
        opened=opened,
        to=to,
        dry_run=dry_run,
        options=options,
        stores=stores,
    )
