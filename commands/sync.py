"""`ftckpt sync`: bring a second tier up to date with a root."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from ftckpt.commands.cli.invocation import Invocation, Result, invoked
from ftckpt.commands.cli.pins_and_tags import RootArgument, actor
from ftckpt.commands.cli.render import human_bytes, human_duration, printable
from ftckpt.commands.cli.replicas import ReplicaOptions
from ftckpt.discovery.open_part import recognise_at
from ftckpt.errors import ExitCode, UsageError
from ftckpt.findings import counted

if TYPE_CHECKING:
    from ftckpt.discovery.roots import Root
    from ftckpt.replication.sync import SyncItem, SyncReport
    from ftckpt.retention.policy import Policy

EXAMPLES = (
    ("ftckpt sync /nvme/run7 s3://bucket/run7 --newest 3", "the last few, to durable storage"),
    (
        "ftckpt sync /ckpt/run7 cold:run7 --every 1000 --tag release",
        "milestones, to another service (named remotes)",
    ),
    ("ftckpt sync /nvme/run7 /shared/run7 --limit-rate 500MB/s -q", "beside a training, from cron"),
    ("ftckpt sync /nvme/run7 s3://bucket/run7 --dry-run", "what it would ship, and the lag"),
)
CODES = {
    ExitCode.OK: "the tier holds all that was chosen; saves in flight wait for the next run",
    ExitCode.CORRUPT: "a checkpoint, or its copy on the tier, is damaged; the others were shipped",
    ExitCode.INCOMPLETE: "a checkpoint changed while it was read; the others were shipped",
    ExitCode.UNSAFE: "hostile content in a checkpoint; the others were shipped",
    ExitCode.REFUSED: "another sync is at work on DST, or DST holds another checkpoint of the name",
    ExitCode.NOT_FOUND: "no such root, or DST is a directory that does not exist",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "disk full or memory budget too small; run it again to go on",
    ExitCode.UNSUPPORTED: "a checkpoint that cannot be copied; the others were shipped",
}
OPTIONS = (ReplicaOptions,)


def command(
    ctx: typer.Context,
    root: RootArgument,
    destination: Annotated[
        str, typer.Argument(metavar="DST", help="The tier: a directory that exists, or a URL.")
    ],
    every: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS", min=1, help="The nearest to each multiple of STEPS, as in gc."
        ),
    ] = None,
    newest: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The N newest, by step and by time.")
    ] = None,
    tag: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Checkpoints with the tag. Repeatable.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Ship again what gc at DST has dropped.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be shipped; write nothing.")
    ] = False,
) -> Result:
    """Ship the checkpoints of a root to another tier, the oldest missing one first.

    Without a rule every committed checkpoint is shipped; several rules add up. Each copy is made
    as ftckpt copy makes it: verified, resumable, visible at the end. Nothing is overwritten or
    removed on either side. A damaged checkpoint is named and does not hold up the others.
    """
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.formats.delta.bases import bases
    from ftckpt.replication.places import is_local
    from ftckpt.replication.sync import SyncOptions, sync
    from ftckpt.retention.scan.entry import ScanOptions

    invocation = invoked(ctx)
    run = invocation.options(ReplicaOptions)
    run.bound()
    source, tier = _root(invocation, root), _tier(invocation, destination)
    _require_apart(source, tier)
    invocation.report(target=root, destination=destination, dry_run=dry_run)
    options = SyncOptions(
        _policy(every, newest, tag),
        run.replication(
            reads_local=source.store.traits.local,
            writes_local=is_local(destination, invocation.stores),
        ),
        invocation.stores,
        dry_run=dry_run,
        again=again,
        actor=actor(),
    )
    report = sync(
        source,
        tier,
        ScanOptions(FORMATS, time.time(), bases=bases),
        options,
        told=lambda item: _tell(invocation, item),
        remark=lambda text: invocation.say(f"no lock: {text}"),
        counter=invocation.counter,
    )
    invocation.close()
    return _show(invocation, report)


def _policy(every: int | None, newest: int | None, tags: list[str] | None) -> Policy | None:
    from ftckpt.retention.policy import Policy

    if not (every or newest or tags):
        return None
    return Policy(keep_every=every, keep_last=newest, keep_tags=tuple(tags or ()))


def _root(invocation: Invocation, path: str) -> Root:
    from ftckpt.discovery import resolve as opening
    from ftckpt.formats.catalog import FORMATS

    invocation.report(target=path)
    place = opening.locate(path, invocation.stores)
    if place.which:
        raise UsageError(
            f"{path} selects one checkpoint of a root", hint="ftckpt copy ships a single one"
        )
    return opening.open_root(place, FORMATS)


def _tier(invocation: Invocation, url: str) -> Root:
    """Return the tier as it is; a prefix of an object store need not hold anything yet.

    Raises:
        NotFoundError: a directory that does not exist: it may be a mount that is gone.
        UsageError: it is a file or a checkpoint.
    """
    from ftckpt.discovery.roots import Root, read_again
    from ftckpt.errors import NotFoundError
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.storage import open_store
    from ftckpt.storage.store import Entry, EntryKind

    store = open_store(url.rstrip("/") or url, invocation.stores)

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
    import os

    from ftckpt.errors import RefusedError

    def place(root: Root) -> str:
        local = root.store.local_path(root.base)
        return root.store.identity(root.base) if local is None else os.path.realpath(local)

    here, there = place(source).rstrip("/") + "/", place(tier).rstrip("/") + "/"
    if here.startswith(there) or there.startswith(here):
        raise RefusedError(
            f"{tier.url} and {source.url} are not apart from each other",
            hint="a tier is another place than the root",
        )


def _tell(invocation: Invocation, item: SyncItem) -> None:
    from ftckpt.replication.sync import SyncState

    size = human_bytes(item.nbytes)
    reason = f" ({item.why})" if item.why else ""
    if item.state is SyncState.SHIPPED and item.report is not None:
        seconds = max(sum(item.report.seconds.values()), 1e-6)
        invocation.print(
            f"shipped {item.name}{reason}: {counted(item.report.files, 'file')}, {size} in "
            f"{human_duration(seconds)}, {_HELD_TO[item.report.evidence]}"
        )
    elif item.state is SyncState.PLANNED:
        invocation.print(f"would ship {item.name}{reason}: {size}")
    elif item.state is SyncState.FAILED:
        invocation.warn(printable(f"not shipped ({item.code.name}): {item.name}: {item.why}"))
    elif item.state is not SyncState.THERE:
        invocation.say(f"not shipped: {item.name}: {item.why}")


_HELD_TO = {
    "manifest": "matches its manifest",
    "crc32": "matches its CRC-32s",
    "none": "nothing to check the source against",
}


def _show(invocation: Invocation, report: SyncReport) -> Result:
    from ftckpt.replication.sync import SyncState

    shipped, there = report.of(SyncState.SHIPPED), report.of(SyncState.THERE)
    missing = report.of(SyncState.PLANNED, SyncState.FAILED)
    steps = [item.step for item in (*shipped, *there) if item.step is not None]
    failed = report.of(SyncState.FAILED)
    invocation.report(
        items=[
            {
                "name": item.name,
                "step": item.step,
                "state": item.state,
                "why": item.why,
                "code": item.code.name,
                "bytes": item.nbytes,
                "destination": None if item.report is None else item.report.url,
                "evidence": None if item.report is None else item.report.evidence,
            }
            for item in report.items
        ],
        shipped=len(shipped),
        bytes=sum(item.nbytes for item in shipped),
        missing=len(missing),
        newest=max(steps, default=None),
        seconds=report.seconds,
    )
    parts = [f"{len(shipped)} shipped", f"{len(there)} there before", f"{len(missing)} missing"]
    last = f"; newest there: step {max(steps)}" if steps else ""
    invocation.print(f"{', '.join(parts)}{last}: {report.destination}")
    if failed:
        first = next(item for item in failed if item.code is report.code)
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return Result(report.code, f"{first.name} was not shipped: {first.why}{more}", "")
    if missing:
        return Result(ExitCode.OK, f"{counted(len(missing), 'checkpoint')} would be shipped")
    return Result(ExitCode.OK, f"{report.destination} holds all that was chosen")
