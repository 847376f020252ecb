"""What the logs of a run say: `incidents`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftckpt.errors import UnavailableError, UsageError
from ftckpt.progress import NULL, Counter

from .opening import seconds

if TYPE_CHECKING:
    from ftckpt.joblogs import IncidentReport
    from ftckpt.joblogs.sources import Read


def incidents(
    *logs: str,
    job: str = "",
    timezone: str = "UTC",
    together: float | str = "15m",
    nodes: int = 0,
    run: str = "",
    prometheus: str = "",
    counter: Counter = NULL,
) -> IncidentReport:
    """Read the logs of one run, and count what failed, how often, where and at what cost.

    Args:
        logs: in any order; "-" is stdin.
        job: the job in Slurm's accounting, by its name or ID.
        timezone: of times without one.
        together: lines no further apart may be of one failure, in seconds or as `15m`.
        nodes: of the job; 0 for those that the logs name.
        run: what metrics call the run; else the first log.
        prometheus: a file to write metrics to, atomically.
        counter: is told of what was read.

    Raises:
        UsageError: no log, or what an argument or a record says cannot be.
        NotFoundError, RefusedError: a log does not exist, or is a directory.
        UnavailableError: a compressed log ends too early.
        NoResourceError: more failures than are kept.
    """
    report, read = read_run(
        logs, job=job, timezone=timezone, together=together, nodes=nodes, counter=counter
    )
    for log in read.logs:
        if log.cut:
            raise UnavailableError(f"{log.path} ends too early: {log.cut}", file=log.path)
    if prometheus:
        write_metrics(prometheus, report, run or logs[0])
    return report


def read_run(
    logs: Sequence[str],
    *,
    job: str = "",
    timezone: str = "UTC",
    together: float | str = "15m",
    nodes: int = 0,
    counter: Counter = NULL,
) -> tuple[IncidentReport, Read]:
    """Return what the logs of one run say, and what was read; see `incidents`.

    A log that ends too early is read as far as it goes.

    Raises:
        UsageError: no log, or what an argument or a record says cannot be.
        NotFoundError, RefusedError: a log does not exist, or is a directory.
        NoResourceError: more failures than are kept.
    """
    from ftckpt.joblogs import read_logs, report_of
    from ftckpt.joblogs.reading.times import zone_of

    if not logs:
        raise UsageError("no log is named")
    apart = seconds(together, "--together")
    if not apart > 0:
        raise UsageError(f"--together {together}: this must be above zero")
    read = read_logs(list(logs), together=apart, zone=zone_of(timezone), job=job, counter=counter)
    return report_of(read.collections, apart, nodes=nodes or None), read


def write_metrics(path: str, report: IncidentReport, name: str) -> None:
    """Write the metrics of a run to a file, atomically."""
    from ftckpt.joblogs.metrics import metrics
    from ftckpt.storage.local.atomic import write_over

    write_over(path, metrics(report, name, time.time()).encode())
