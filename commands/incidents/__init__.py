"""`ftckpt incidents`: what failed, how often, where, and what did it cost?"""

from __future__ import annotations

from typing import Annotated

from ftckpt.amounts import duration
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations.definition import argument, option, switch
from ftckpt.storage.local.writable import check_file

STORAGE = False
EXAMPLES = (
    ("ftckpt incidents slurm-*.out", "failures by class, component and node, with error bars"),
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
    ("ftckpt plan --from-log run7.jsonl --save 60s", "the next plan, from the same incidents"),
)
CODES = {
    ExitCode.OK: "all logs were read to their end, incidents or not",
    ExitCode.USAGE: "a record is none, or the accounting has several jobs and --job names none",
    ExitCode.REFUSED: "a log is a directory, or one stands where --html or --prometheus write",
    ExitCode.NOT_FOUND: "a log does not exist, or no log says anything that is known",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "more failures and breaks than are kept, or the disk is full",
    ExitCode.PARTIAL: "a compressed log ends too early; what could be read is told",
}


def command(
    invocation: Invocation,
    logs: Annotated[list[str], argument("LOG...", "Logs of one run, in any order; - is stdin.")],
    job: Annotated[str, option("NAME", "The job in Slurm's accounting: its name or ID.")] = "",
    timezone: Annotated[
        str, option("ZONE", "Zone of times without one: Europe/Berlin, +02:00.")
    ] = "UTC",
    together: Annotated[str, option("T", "Lines no further apart may be of one failure.")] = "15m",
    nodes: Annotated[int, option("N", "Nodes of the job; 0: those that the logs name.", min=0)] = 0,
    all_: Annotated[bool, switch("--all", "List every incident, not the last 20.")] = False,
    run: Annotated[str, option("NAME", "What to call the run; else the first log.")] = "",
    html: Annotated[str, option("FILE", "Write one self-contained page.")] = "",
    prometheus: Annotated[str, option("FILE", "Write metrics for node_exporter, atomically.")] = "",
) -> Result:
    """Show what failed, how often and where, from job logs, sacct and the guard's log.

    Each kind of log is recognised by its first line. Lines of many ranks about one failure are one
    incident, named after its cause. Rates have exact Poisson limits (95 %). What no log says is
    "unknown". Of a log's lines only fixed words are repeated.
    """
    from ftckpt.api.learning import read_run, write_metrics

    from .json_document import document
    from .text import headline, text_of

    for flag, path in (("--html", html), ("--prometheus", prometheus)):
        if path:
            check_file(flag, path)
    name = run or logs[0]
    invocation.report(target=name)
    report, read = read_run(
        logs, job=job, timezone=timezone, together=duration(together, "--together"),
        nodes=nodes, counter=invocation.counter,
    )  # fmt: skip
    invocation.close()
    invocation.report(**document(report, read))
    if not any(log.entries for log in read.logs):
        return invocation.fail(
            ExitCode.NOT_FOUND,
            f"{counted(len(logs), 'log')} read, and no line says anything that is known",
            "docs/incidents.md lists what is recognised; it does not prove that nothing failed",
        )
    invocation.print(text_of(report, read, timezone, everything=all_))
    if html:
        from .page import write_page

        write_page(html, report, read, name)
        invocation.report(html=html)
        invocation.say(f"page: {html}")
    if prometheus:
        write_metrics(prometheus, report, name)
    cut = [log for log in read.logs if log.cut]
    if cut:
        return invocation.fail(
            ExitCode.PARTIAL,
            f"{cut[0].path} ends too early: {cut[0].cut}",
            "what stood behind it is not in these numbers",
        )
    return Result(ExitCode.OK, headline(report))
