"""What the logs of a run say: `incidents`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from ftckpt import amounts
from ftckpt.errors import ExitCode, UsageError
from ftckpt.observer import SILENT, Observer
from ftckpt.storage.local.writable import check_file

from .definition import argument, operation, option

if TYPE_CHECKING:
    from ftckpt.joblogs import IncidentReport


@operation(
    examples=(
        (
            "ftckpt incidents slurm-*.out",
            "failures by class, component and node, with error bars",
        ),
        (
            "ftckpt incidents slurm-*.out kern-n*.log.gz /ckpt/run7/.ftckpt/guard.jsonl",
            "job, kernel and guard of one run: lines of one failure are one incident",
        ),
        (
            "sacct --parsable2 --allocations --duplicates --starttime 2026-01-01 "
            "--format JobID,JobName,State,Start,End,NodeList,ExitCode > sacct.txt; "
            "ftckpt incidents sacct.txt --job run7 --timezone Europe/Berlin",
            "one job of Slurm's accounting, whose times have no zone",
        ),
        ("ftckpt incidents run7.jsonl --html incidents.html", "one page for the review"),
        (
            "ftckpt plan --from-log run7.jsonl --save 60s",
            "the next plan, from the same incidents",
        ),
    ),
    codes={
        ExitCode.OK: "all logs were read to their end, incidents or not",
        ExitCode.USAGE: "a record is none, or the accounting has several jobs and --job names none",
        ExitCode.REFUSED: "a log is a directory, or one stands where --html or --prometheus write",
        ExitCode.NOT_FOUND: "a log does not exist, or no log says anything that is known",
        ExitCode.UNAVAILABLE: "",
        ExitCode.DENIED: "",
        ExitCode.NO_RESOURCE: "more failures and breaks than are kept, or the disk is full",
        ExitCode.PARTIAL: "a compressed log ends too early; what could be read is told",
    },
    everyday=("--job", "--timezone", "--all", "--html"),
)
def incidents(
    *logs: Annotated[str, argument("LOG...", "Logs of one run, in any order; - is stdin.")],
    job: Annotated[str, option("NAME", "The job in Slurm's accounting: its name or ID.")] = "",
    timezone: Annotated[
        str, option("ZONE", "Zone of times without one: Europe/Berlin, +02:00.")
    ] = "UTC",
    together: Annotated[
        amounts.Duration, option("T", "Lines no further apart may be of one failure.")
    ] = "15m",
    nodes: Annotated[int, option("N", "Nodes of the job; 0: those that the logs name.", min=0)] = 0,
    run: Annotated[str, option("NAME", "What to call the run; else the first log.")] = "",
    prometheus: Annotated[str, option("FILE", "Write metrics for node_exporter, atomically.")] = "",
    on: Observer = SILENT,
) -> IncidentReport:
    """Show what failed, how often and where, from the logs of jobs.

    Each kind of log is recognised by its first line. Lines of many ranks about one failure are one
    incident, named after its cause. Rates have exact Poisson limits (95 %). What no log says is
    "unknown". Of a log's lines only fixed words are repeated.

    Returns:
        All that they say; a log that ends too early is read as far as it goes.

    Raises:
        UsageError: no log, or what an argument or a record says cannot be.
        NotFoundError, RefusedError: a log does not exist, or is a directory.
        NoResourceError: more failures than are kept.
    """
    from ftckpt.joblogs import read_logs, report_of
    from ftckpt.joblogs.reading.times import zone_of

    if not logs:
        raise UsageError("no log is named")
    if prometheus:
        check_file("--prometheus", prometheus)
    name = run or logs[0]
    on.report(target=name)
    apart = amounts.seconds(together, "--together")
    if not apart > 0:
        raise UsageError(f"--together {together}: this must be above zero")
    read = read_logs(
        list(logs), together=apart, zone=zone_of(timezone), job=job, counter=on.counter
    )
    found = report_of(read.collections, apart, nodes=nodes or None)
    report = replace(
        found, logs=read.logs, ignored=read.ignored, side_by_side=len(read.collections)
    )
    if prometheus and report.code is not ExitCode.NOT_FOUND:
        from ftckpt.joblogs.metrics import metrics
        from ftckpt.storage.local.atomic import write_over

        write_over(prometheus, metrics(report, name, time.time()).encode())
    return report
