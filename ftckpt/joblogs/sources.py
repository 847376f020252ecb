"""Read logs of any kind that is known, each recognised by its first line.

| kind | its first line |
|---|---|
| `records` | a JSON object with an `event` (docs/incidents.md) |
| `guard` | the same, of the guard's schema (docs/guard.md) |
| `sacct` | names of columns, among them `JobID` and `State`: `sacct --parsable2` |
| `sacct-json` | the beginning of a JSON document: `sacct --json` |
| `text` | anything else: the log of a trainer, torchrun, a kernel, Slurm |
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, tzinfo
from itertools import chain
from typing import NamedTuple

from ftckpt.errors import UsageError
from ftckpt.progress import NULL, Counter

from .collect import Collection, LogEntry, LogEntryKind
from .reading import records, slurm
from .reading.records import LineTally, lines_of
from .reading.text_log import TextLog
from .reading.times import Stamps

TOGETHER = 900.0
_DOCUMENT = 256 << 20


class SourceLog(NamedTuple):
    """One file that was read.

    Attributes:
        path: as named.
        kind: `records`, `guard`, `sacct`, `sacct-json` or `text`.
        lines: their number.
        nbytes: after decompression.
        entries: that were found in it.
        long: lines of which only the beginning was looked at.
        cut: why it ends before its end; "" where it does not.
        zoneless: whether times without a zone were read.
        yearless: whether times without a year were read.
    """

    path: str
    kind: str
    lines: int
    nbytes: int
    entries: int
    long: int
    cut: str
    zoneless: bool
    yearless: bool


class Read(NamedTuple):
    """All files.

    Attributes:
        collections: of each job; several only where `sacct` shows some that ran side by side.
        logs: the files.
        ignored: number of events that are of no known kind.
    """

    collections: tuple[Collection, ...]
    logs: tuple[SourceLog, ...]
    ignored: int


def read_logs(
    paths: Sequence[str],
    *,
    together: float = TOGETHER,
    zone: tzinfo = UTC,
    job: str = "",
    counter: Counter = NULL,
) -> Read:
    """Read the logs of one run.

    Args:
        paths: of the files; `-` is stdin.
        together: seconds within which two lines may be of one failure.
        zone: of times that name none.
        job: ID or name of the job that is meant, where `sacct` shows several.
        counter: told of bytes.

    Raises:
        UsageError: a record is none, or several jobs ran beside one another and `job` is "".
        NotFoundError, DeniedError, RefusedError, UnavailableError: a file cannot be read.
        NoResourceError: the logs say more than is kept.
    """
    run = Collection(together)
    logs: list[SourceLog] = []
    rows: list[tuple[slurm.JobRow, int]] = []
    counter.start("read", sum(map(_size, paths)), "bytes")
    for number, path in enumerate(paths):
        tally = LineTally()
        stamps = Stamps(zone, _newest(path))
        lines = lines_of(path, tally)
        head = [next(lines, b"")]
        while not head[-1].strip() and (more := next(lines, None)) is not None:
            head = [more]
        kind = _kind(head[-1])
        before = sum(run.events.values()) + len(rows)
        body = _counted(chain(head, lines), tally, counter)
        if kind.startswith("sacct"):
            rows += ((row, number) for row in _rows(kind, path, body, tally, stamps))
        else:
            run.take(_entries(kind, path, body, stamps, number))
        logs.append(
            SourceLog(
                path, kind, tally.lines, tally.nbytes,
                sum(run.events.values()) + len(rows) - before, tally.long, tally.cut,
                stamps.zoneless, stamps.yearless,
            )
        )  # fmt: skip
    others = _jobs(run, rows, together, job)
    return Read((run, *others), tuple(logs), run.events[LogEntryKind.OTHER])


def _kind(line: bytes) -> str:
    if slurm.is_header(line):
        return "sacct"
    if records.is_record(line):
        return "guard" if records.GUARD.encode() in line else "records"
    return "sacct-json" if slurm.is_document(line) else "text"


def _entries(
    kind: str, path: str, lines: Iterator[bytes], stamps: Stamps, number: int
) -> Iterator[LogEntry]:
    if kind == "records":
        return records.of_events(lines, path, number)
    if kind == "guard":
        return records.of_guard(lines, number)
    return TextLog(stamps, number).entries(lines)


def _rows(
    kind: str, path: str, lines: Iterator[bytes], tally: LineTally, stamps: Stamps
) -> Iterator[slurm.JobRow]:
    if kind == "sacct":
        return slurm.of_table(lines, path, stamps)
    if path != "-":  # a document may be one line
        tally.lines = tally.nbytes = tally.long = 0
        lines = lines_of(path, tally, _DOCUMENT)
    return slurm.of_document(lines, path)


def _jobs(
    run: Collection, rows: Sequence[tuple[slurm.JobRow, int]], together: float, job: str
) -> list[Collection]:
    """Give the accounting's one job to the run; return others as collections of their own."""
    sources = dict(rows)
    wanted = [row for row, _ in rows if job in ("", row.name, row.job, row.job.partition("_")[0])]
    if rows and not wanted:
        names = sorted({row.name for row, _ in rows})[:5]
        raise UsageError(f"--job {job}: no such job", hint=f"the accounting has {', '.join(names)}")
    jobs = slurm.lanes(dict.fromkeys(wanted))
    entries = [
        [entry for row in lane for entry in slurm.entries_of(row, sources[row])] for lane in jobs
    ]
    if len(jobs) > 1 and (run.sightings or run.stretches or run.saves or run.starts):
        names = sorted({lane[0].name or lane[0].job for lane in jobs})
        raise UsageError(
            f"the accounting has {len(jobs)} jobs side by side, and the other logs are of one: "
            f"{', '.join(names[:5])}",
            hint=f"say which: --job {names[0]}",
        )
    if len(jobs) <= 1:
        for each in entries:
            run.take(each)
        return []
    run.take(entries[0])
    others = []
    for each in entries[1:]:
        others.append(Collection(together))
        others[-1].take(each)
    return others


def _counted(lines: Iterator[bytes], tally: LineTally, counter: Counter) -> Iterator[bytes]:
    told = 0
    for line in lines:
        if tally.nbytes > told:
            counter.add(tally.nbytes - told)
            told = tally.nbytes
        yield line


def _size(path: str) -> int:
    try:
        return 0 if path == "-" else os.stat(path).st_size
    except OSError:
        return 0


def _newest(path: str) -> float:
    """Return when a file was last written: no time in it is later."""
    try:
        return time.time() if path == "-" else os.stat(path).st_mtime
    except OSError:
        return time.time()
