r"""Read what Slurm's accounting says: `sacct --parsable2` and `sacct --json`.

    sacct --parsable2 --allocations --duplicates \
        --format JobID,JobName,State,Start,End,NodeList,ExitCode

One row is one attempt of a job. Steps (`42.batch`) are passed over: their job says the same. The
states are those of `man sacct`: BOOT_FAIL, NODE_FAIL, OUT_OF_MEMORY, PREEMPTED, FAILED and
LAUNCH_FAILED are failures; CANCELLED, COMPLETED, DEADLINE, TIMEOUT, REQUEUED and REVOKED are ends
that somebody planned, and so is FAILED with the code 75 (EX_TEMPFAIL); others still run or wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import Any, NamedTuple

from ftckpt.errors import NoResourceError, UsageError
from ftckpt.joblogs import collect
from ftckpt.joblogs.collect import Fault, LogEntry, LogEntryKind, Weight
from ftckpt.strict_json import JsonError, decode

from .times import Stamps

_FAILED: dict[str, Fault] = {
    "BOOT_FAIL": collect.NODE,
    "NODE_FAIL": collect.NODE,
    "OUT_OF_MEMORY": collect.HOST_MEMORY,
    "PREEMPTED": collect.PREEMPTED,
    "FAILED": collect.FAILED,
    "LAUNCH_FAILED": collect.NODE,
}
_ENDED = frozenset({"CANCELLED", "COMPLETED", "DEADLINE", "TIMEOUT", "REQUEUED", "REVOKED"})
_MOST_BYTES = 256 << 20  # of a JSON document, which is held in memory
_LATEST = 4.1e9


class JobRow(NamedTuple):
    """One attempt of a job.

    Attributes:
        job: its ID.
        name: its name.
        state: as Slurm calls it.
        start: seconds since the epoch; None where it never started or nobody says.
        end: the same; None while it runs.
        node: the node that failed, else the only one.
        code: exit code and signal, `1:0`; "" where nothing says it.
        line: number in its file.
    """

    job: str
    name: str
    state: str
    start: float | None
    end: float | None
    node: str
    code: str
    line: int


def is_header(line: bytes) -> bool:
    """Return whether a line names the columns of `sacct --parsable2` (or `--parsable`)."""
    names = line.strip().lower().split(b"|")
    return b"state" in names and (b"jobid" in names or b"jobidraw" in names)


def is_document(line: bytes) -> bool:
    """Return whether a file that begins so may be one JSON document and not lines of objects."""
    text = line.strip()
    return text == b"{" or text.startswith((b'{"meta"', b'{"jobs"', b'{ "jobs"', b'{ "meta"'))


def of_table(lines: Iterable[bytes], name: str, stamps: Stamps) -> Iterator[JobRow]:
    """Yield the rows of `sacct --parsable2`; a repeated header is passed over.

    Raises:
        UsageError: a column that is needed is missing.
    """
    columns: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        cells = line.decode("utf-8", "replace").strip("\n").split("|")
        if is_header(line):
            columns = {cell.strip().lower(): place for place, cell in enumerate(cells)}
            missing = [one for one in ("state", "start", "end") if one not in columns]
            if missing:
                raise UsageError(
                    f"{name} has no column {' and '.join(missing)}",
                    hint="sacct --parsable2 --allocations --duplicates --format "
                    "JobID,JobName,State,Start,End,NodeList,ExitCode",
                )
            continue
        if not columns or len(cells) < len(columns):
            continue  # cut, or words between the rows

        cell = {column: cells[place].strip() for column, place in columns.items()}
        job = cell.get("jobid") or cell.get("jobidraw", "")
        state = cell["state"].split(" ")[0].rstrip("+")
        if not job or "." in job or not state:
            continue
        yield JobRow(
            job[:60], cell.get("jobname", "")[:60], state, stamps.of_text(cell["start"]),
            stamps.of_text(cell["end"]),
            _one_node(cell.get("failednode") or cell.get("nodelist", "")),
            cell.get("exitcode", "")[:12], number,
        )  # fmt: skip


def of_document(lines: Iterable[bytes], name: str) -> Iterator[JobRow]:
    """Yield the jobs of `sacct --json`, of any of its versions.

    Raises:
        UsageError: it is not such a document.
        NoResourceError: it is too large to hold.
    """
    parts, size = [], 0
    for line in lines:
        size += len(line) + 1
        if size > _MOST_BYTES:
            raise NoResourceError(
                f"{name} is a JSON document of more than 256 MiB",
                hint="sacct --parsable2 is read line by line",
            )
        parts.append(line)
    try:
        document = decode(b"\n".join(parts))
    except JsonError as error:
        raise UsageError(f"{name} {error}") from error
    jobs = document.get("jobs") if isinstance(document, dict) else None
    if not isinstance(jobs, list):
        raise UsageError(f"{name} holds no jobs", hint="sacct --json writes them")
    for number, job in enumerate(jobs, 1):
        if isinstance(job, dict):
            yield _job(job, number)


def _job(job: Mapping[str, Any], number: int) -> JobRow:
    state = _inside(job, "state").get("current", job.get("state"))
    state = state[0] if isinstance(state, list) and state else state
    times = _inside(job, "time")
    code = _inside(job, "exit_code")
    signal = _value(_inside(code, "signal").get("id", _inside(code, "signal").get("signal_id")))
    returned = _value(code.get("return_code"))
    return JobRow(
        str(_value(job.get("job_id")) or "")[:60],
        str(job.get("name") or "")[:60],
        (state if isinstance(state, str) else "").split(" ")[0],
        _moment(times.get("start")),
        _moment(times.get("end")),
        _one_node(str(job.get("failed_node") or job.get("nodes") or "")),
        "" if returned is None and signal is None else f"{returned or 0:.0f}:{signal or 0:.0f}",
        number,
    )


def _inside(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _value(value: Any) -> int | float | None:
    """Return a number, which newer versions wrap in an object that says whether it is set."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set", True) else None
    # Slurm writes none beyond 64 bits, and an integer may be too large for a float.
    return value if type(value) in (int, float) and abs(value) < 1 << 63 else None


def _moment(value: Any) -> float | None:
    number = _value(value)
    return float(number) if number is not None and 0 < number < _LATEST else None


def _one_node(nodes: str) -> str:
    """Return the name of a node where the list is of one."""
    alone = nodes not in ("", "None assigned", "(null)") and not set(nodes) & set("[,")
    return nodes[:63] if alone else ""


def entries_of(row: JobRow, source: int) -> Iterator[LogEntry]:
    """Yield the start of an attempt and its end, a failure or not."""
    if row.start is None:
        return  # it never ran
    yield LogEntry(LogEntryKind.START, row.start, source=source, line=row.line)
    if row.end is None:
        return
    fault = _FAILED.get(row.state)
    again = row.state == "FAILED" and row.code == "75:0"
    if fault is None or again:
        if again or row.state in _ENDED:
            yield LogEntry(LogEntryKind.END, row.end, source=source, line=row.line, planned=True)
        return
    killed = row.code.partition(":")[2]
    if fault is collect.FAILED and killed == "9":
        fault = collect.KILLED
    elif fault is collect.FAILED and killed == "6":
        fault = collect.ABORTED
    elif fault is collect.FAILED and killed in ("4", "7", "8", "11"):
        fault = collect.CRASHED
    sign = row.state if row.state in ("NODE_FAIL", "PREEMPTED") else f"{row.state} {row.code}"
    yield LogEntry(
        LogEntryKind.FAILURE, row.end, fault, Weight.RECORD, node=row.node, sign=sign.strip(),
        source=source, line=row.line,
    )  # fmt: skip


def lanes(rows: Iterable[JobRow]) -> list[list[JobRow]]:
    """Divide attempts into jobs: each a sequence in which no two ran at the same time.

    A job that is submitted or requeued again follows itself. Attempts of one name stay together;
    what ran beside them is another job.
    """
    found: list[list[JobRow]] = []
    # By name: lanes in which something runs, the first to end first; and those that are free, the
    # last that ended on top, because a start never comes before an earlier one. Of lanes that ended
    # together the oldest is taken first.
    running: dict[str, list[tuple[float, int]]] = defaultdict(list)
    free: dict[str, list[int]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.start or 0.0, row.end or _LATEST)):
        if row.start is None:
            continue
        busy, idle = running[row.name], free[row.name]
        while busy and busy[0][0] <= row.start:
            idle.append(-heappop(busy)[1])
        # An array's tasks and unnamed jobs are told apart by their times alone.
        if idle:
            number = idle.pop()
            found[number].append(row)
        else:
            number = len(found)
            found.append([row])
        heappush(busy, (row.end or _LATEST, -number))
    return found
