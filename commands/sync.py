"""`ftckpt sync`: bring a second tier up to date with a root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.alerts import AlertOptions, Alerts
from ftckpt.commands.cli.invocation import Invocation, Relay, Result
from ftckpt.commands.cli.render import human_bytes, human_duration, printable
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations import replicating

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.observer import Observer
    from ftckpt.replication.sync import SyncItem, SyncReport

operation = replicating.sync
OPTIONS = (AlertOptions,)


class _Items(Relay):
    """Prints each checkpoint as it is decided."""

    def end(self, report: SyncItem) -> None:
        """Print what became of one."""
        _tell(self.invocation, report)


def observer(invocation: Invocation, _: Mapping[str, Any]) -> Observer:
    """Return what prints the checkpoints."""
    return _Items(invocation)


def check(invocation: Invocation, given: Mapping[str, Any]) -> None:
    """Begin to tell of what is not shipped.

    Raises:
        UsageError: the webhook is not a URL.
    """
    options, places = invocation.options(AlertOptions), (given["root"], given["destination"])
    invocation.groups[Alerts] = options.begin(invocation, "sync", *places)


def render(invocation: Invocation, report: SyncReport, given: Mapping[str, Any]) -> Result:
    """Tell what was not shipped, and print the sum."""
    from ftckpt.replication.sync import SyncState

    alerts = invocation.options(Alerts)
    invocation.close()
    for item in report.items:
        if item.code is not ExitCode.OK:
            alerts.add("not-shipped", f"{item.name}: {item.why}", "", [item.name])
    alerts.complete(acted=not given["dry_run"])
    there = len(report.of(SyncState.THERE))
    parts = [f"{report.shipped} shipped", f"{there} there before", f"{report.missing} missing"]
    last = "" if report.newest is None else f"; newest there: step {report.newest}"
    invocation.print(f"{', '.join(parts)}{last}: {report.destination}")
    failed = report.of(SyncState.FAILED)
    if failed:
        first = next(item for item in failed if item.code is report.code)
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        return Result(report.code, f"{first.name} was not shipped: {first.why}{more}", "")
    if report.missing:
        return Result(message=f"{counted(report.missing, 'checkpoint')} would be shipped")
    return Result(message=f"{report.destination} holds all that was chosen")


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
