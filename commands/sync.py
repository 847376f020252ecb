"""`ftckpt sync`: bring a second tier up to date with a root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.alerts import AlertOptions
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.pins_and_tags import RootArgument
from ftckpt.commands.cli.render import human_bytes, human_duration, printable
from ftckpt.commands.cli.replicas import ReplicaOptions
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations.definition import argument, option, switch

if TYPE_CHECKING:
    from ftckpt.replication.sync import SyncItem, SyncReport

EXAMPLES = (
    ("ftckpt sync /nvme/run7 s3://bucket/run7 --newest 3", "the last few, to durable storage"),
    (
        "ftckpt sync /ckpt/run7 cold:run7 --every 1000 --tag release",
        "milestones, to another service (named remotes)",
    ),
    ("ftckpt sync /nvme/run7 /shared/run7 --limit-rate 500MiB/s -q", "beside a trainer, from cron"),
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
OPTIONS = (ReplicaOptions, AlertOptions)


def command(
    invocation: Invocation,
    root: RootArgument,
    destination: Annotated[str, argument("DST", "The tier: a directory that exists, or a URL.")],
    every: Annotated[
        int | None, option("STEPS", "The nearest to each multiple of STEPS, as in gc.", min=1)
    ] = None,
    newest: Annotated[int | None, option("N", "The N newest, by step and by time.", min=1)] = None,
    tag: Annotated[list[str] | None, option("TAG", "Checkpoints with the tag. Repeatable.")] = None,
    again: Annotated[bool, switch("--again", "Ship again what gc at DST has dropped.")] = False,
    dry_run: Annotated[
        bool, switch("--dry-run", "Show what would be shipped; write nothing.")
    ] = False,
) -> Result:
    """Ship the checkpoints of a root to another tier, the oldest missing one first.

    Without a rule every committed checkpoint is shipped; several rules add up. Each copy is made
    as ftckpt copy makes it: verified, resumable, visible at the end. Nothing is overwritten or
    removed on either side. A damaged checkpoint is named and does not hold up the others.
    """
    from ftckpt.api.replicating import require_apart, source_root, sync, tier_at

    run = invocation.options(ReplicaOptions)
    run.bound()
    invocation.report(target=root)
    alerts = invocation.options(AlertOptions).begin(invocation, "sync", root, destination)
    source = source_root(root, invocation.stores)
    tier = tier_at(destination, invocation.stores)
    require_apart(source, tier)
    invocation.report(target=root, destination=destination, dry_run=dry_run)
    report = sync(
        source,
        tier,
        every=every,
        newest=newest,
        tag=tag,
        again=again,
        dry_run=dry_run,
        stores=invocation.stores,
        counter=invocation.counter,
        told=lambda item: _tell(invocation, item),
        remark=lambda text: invocation.say(f"no lock: {text}"),
        **run.flags,
    )
    invocation.close()
    for item in report.items:
        if item.code is not ExitCode.OK:
            alerts.add("not-shipped", f"{item.name}: {item.why}", "", [item.name])
    alerts.complete(acted=not dry_run)
    return _show(invocation, report)


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
        invocation.errors += 1
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
