r"""Read logs of one JSON object a line: a run's own events, and the guard's log.

    {"event": "start", "time": 1767225600, "node": "n1", "step": 1000}
    {"event": "step", "time": 1767225604.1, "step": 1001, "seconds": 4.1, "rank": 0}
    {"event": "save", "time": 1767225600, "step": 1000, "seconds": 61.2, "bytes": 5.7e12}
    {"event": "save", "time": "2026-01-01T00:20:00Z", "snapshot": 1.6, "flush": 58.0}
    {"event": "failure", "time": 1767230000, "class": "gpu", "component": "gpu", "node": "n7",
     "rank": 56, "detect": 95, "restart": 480}
    {"event": "end", "time": 1769817600}

`time` is seconds since the epoch or ISO 8601 with its zone; every duration is in seconds. The time
of a failure is when it struck. `start` and `end` bound the time in which failures were counted;
without them it is from the first time in the log to the last.

Read the lines of a log in bounded memory, whatever the file holds.

A line may be a gigabyte long, a file binary, a gzip stream cut. Of a line only the first bytes are
looked at; progress bars that rewrite their line with `\r` are lines of their own.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO

from ftckpt.errors import FtckptError, RefusedError, UsageError
from ftckpt.joblogs import collect
from ftckpt.joblogs.collect import LogEntry, LogEntryKind, Weight
from ftckpt.storage.local.oserror import translate
from ftckpt.strict_json import JsonError, decode

LONGEST = 1 << 16  # bytes of a line that are looked at
_CHUNK = 1 << 20
_GZIP = b"\x1f\x8b"


@dataclass
class LineTally:
    """What reading one file has met.

    Attributes:
        lines: their number.
        nbytes: after decompression.
        long: lines of which only the beginning was looked at.
        cut: why the file ends before its end; "" where it does not.
    """

    lines: int = 0
    nbytes: int = 0
    long: int = 0
    cut: str = ""


def lines_of(path: str, tally: LineTally, longest: int = LONGEST) -> Iterator[bytes]:
    """Yield the lines of a file without their ends; `-` is stdin. `tally` is kept up to date.

    Of a line with more than `longest` bytes only those are given.

    Raises:
        NotFoundError, DeniedError, RefusedError, UnavailableError: it cannot be read.
    """
    rest, skipping = b"", False
    for chunk in _chunks(path, tally):
        tally.nbytes += len(chunk)
        *whole, rest_of_chunk = chunk.replace(b"\r", b"\n").split(b"\n")
        if whole:
            whole[0] = rest + whole[0]
            rest = b""
            if skipping:  # the end of a line that was given out already
                whole = whole[1:]
                skipping = False
        for line in whole:
            tally.lines += 1
            if len(line) > longest:
                tally.long += 1
                line = line[:longest]
            yield line
        if skipping:
            continue
        rest += rest_of_chunk
        if len(rest) > longest:
            tally.lines += 1
            tally.long += 1
            yield rest[:longest]
            rest, skipping = b"", True
    if rest:
        tally.lines += 1
        yield rest


def _chunks(path: str, tally: LineTally) -> Iterator[bytes]:
    try:
        if path == "-":
            yield from _opened(sys.stdin.buffer, path, tally)
            return
        with open(path, "rb", buffering=0) as file:
            yield from _opened(file, path, tally)
    except OSError as error:
        raise _refused(error, path) from error


def _refused(error: OSError, path: str) -> FtckptError:
    if isinstance(error, IsADirectoryError):
        return RefusedError(f"{path} is a directory, not a log", hint=f"name files: {path}/*.log")
    return translate(error, path, "read")


def _opened(file: BinaryIO, path: str, tally: LineTally) -> Iterator[bytes]:
    chunk = file.read(_CHUNK)
    if chunk[:2] == _GZIP:
        yield from _unzipped(file, chunk, tally)
        return
    while chunk:
        yield chunk
        chunk = file.read(_CHUNK)


def _unzipped(file: BinaryIO, chunk: bytes, tally: LineTally) -> Iterator[bytes]:
    """Decompress one gzip member after another; a damaged or cut stream ends the file."""
    stream = zlib.decompressobj(wbits=31)
    begun = True
    try:
        while chunk:
            if stream.eof:
                if not chunk.strip(b"\0"):
                    return  # padding behind the last member
                stream, begun = zlib.decompressobj(wbits=31), True
            made = stream.decompress(chunk, _CHUNK)
            if made:
                yield made
            chunk = stream.unused_data if stream.eof else stream.unconsumed_tail
            if stream.eof:
                begun = False
            chunk = chunk or file.read(_CHUNK)
        if begun and (made := stream.flush()):
            yield made
    except zlib.error as error:
        tally.cut = f"damaged gzip: {error}"
        return
    if begun and not stream.eof:
        tally.cut = "the gzip stream is cut"


GUARD = "ftckpt.guard-log/1"
# Numeric fields of each event, none of them below zero.
_NUMBERS = {
    "save": ("seconds", "snapshot", "flush", "bytes"),
    "failure": ("detect", "restart"),
    "step": ("seconds",),
    "start": (),
    "end": (),
}
_WHOLE = ("step", "rank")
_NAME = 200
_LATEST = 4.1e9
_EPOCH, _NONE = datetime(1970, 1, 1, tzinfo=UTC), timedelta()


def is_record(line: bytes) -> bool:
    """Return whether a line is an event of such a log."""
    return _event(line) is not None


def of_events(lines: Iterable[bytes], name: str, source: int) -> Iterator[LogEntry]:
    """Yield the events of a log; empty lines are skipped, unknown events have no entry.

    Raises:
        UsageError: names the line that is not an event, or the value that is not a number.
    """
    for number, line in enumerate(lines, 1):
        place = f"line {number} of {name}"
        if len(line) >= LONGEST:
            raise UsageError(f"{place} is longer than any event")
        if not line.strip():
            continue
        try:
            event = decode(line)
        except JsonError as error:
            raise UsageError(f"{place} {error}") from error
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise UsageError(
                f"{place} is not an event", hint='write {"event": "save", "seconds": 61}'
            )
        yield _entry(event, place, source, number)


def _entry(event: Mapping[str, Any], place: str, source: int, number: int) -> LogEntry:
    kind = event["event"]
    if kind not in _NUMBERS:
        return LogEntry(LogEntryKind.OTHER, source=source, line=number)
    numbers = {
        key: _number(event[key], key, place) for key in _NUMBERS[kind] if event.get(key) is not None
    }
    whole = {key: _whole(event[key], key, place) for key in _WHOLE if event.get(key) is not None}
    entry = LogEntry(
        LogEntryKind(kind),
        _time(event["time"], place) if event.get("time") is not None else None,
        node=_text(event.get("node")),
        rank=whole.get("rank"),
        step=whole.get("step"),
        seconds=numbers.get("seconds"),
        snapshot=numbers.get("snapshot"),
        flush=numbers.get("flush"),
        nbytes=numbers.get("bytes"),
        detect=numbers.get("detect"),
        restart=numbers.get("restart"),
        source=source,
        line=number,
        planned=kind == "end",
    )
    if kind != "failure":
        return entry
    named = _text(event.get("class"))
    fault = collect.of_record(named, _text(event.get("component")))
    return entry._replace(fault=fault, sign=named)


def of_guard(lines: Iterable[bytes], source: int) -> Iterator[LogEntry]:
    """Yield what a guard did (docs/guard.md); damaged lines are passed over, as its readers do.

    A guard that was killed is seen by the next one: the failure has the last time before that.
    """
    seen: float | None = None
    hosts: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        event = _event(line)
        time = None if event is None else _guard_time(event)
        if event is None or time is None:
            continue
        token = _text(event.get("token"))
        told = LogEntry(LogEntryKind.OTHER, time, step=_step(event), source=source, line=number)
        match event["event"]:
            case "start":
                hosts = {token: _text(event.get("host"))}
                yield told._replace(kind=LogEntryKind.START, node=hosts[token])
            case "saved":
                yield told._replace(kind=LogEntryKind.SAVE, noticed=True)
            case "ended":
                if event.get("ending") is None and seen is not None:
                    told = told._replace(time=seen)
                yield _ended(event, told._replace(node=hosts.get(token, "")))
        seen = time


def _guard_time(event: Mapping[str, Any]) -> float | None:
    time = event.get("time")
    return float(time) if isinstance(time, (int, float)) and 0 < time < _LATEST else None


def _ended(event: Mapping[str, Any], told: LogEntry) -> LogEntry:
    ending, code = event.get("ending"), event.get("code")
    if ending in ("done", "stopped") or (ending == "failed" and code == 75):
        return told._replace(kind=LogEntryKind.END, planned=True)
    if ending == "preempted":
        fault, sign = collect.PREEMPTED, "guard: preempted"
    elif ending == "hung":
        fault, sign = collect.HUNG, "guard: saves stopped"
    elif ending is None:
        fault, sign = collect.NODE, "guard: the guard itself was killed"
    elif code in (137, -9):
        fault, sign = collect.KILLED, "guard: command ended with 137"
    elif code in (134, -6):
        fault, sign = collect.ABORTED, f"guard: command ended with {code}"
    elif type(code) is int and 129 <= code <= 159:
        fault, sign = collect.CRASHED, f"guard: command ended with {code}"
    else:
        fault = collect.FAILED
        sign = f"guard: command ended with {code}" if type(code) is int else "guard: failed"
    return told._replace(kind=LogEntryKind.FAILURE, fault=fault, weight=Weight.RECORD, sign=sign)


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        found = decode(line)
    except JsonError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) else None


def _step(event: Mapping[str, Any]) -> int | None:
    step = event.get("step")
    return step if type(step) is int and 0 <= step < 1 << 62 else None


def _text(value: Any) -> str:
    return value[:_NAME] if isinstance(value, str) else ""


def _number(value: Any, key: str, place: str) -> float:
    # JSON's true is Python's 1, and an integer may be too large for a float.
    if type(value) in (int, float) and 0 <= value < 1e300 and math.isfinite(value):
        return float(value)
    raise UsageError(f"{place}: {key} is not a number of seconds or bytes: {value!r:.80}")


def _whole(value: Any, key: str, place: str) -> int:
    if type(value) is int and 0 <= value < 1 << 62:
        return value
    raise UsageError(f"{place}: {key} is not a count: {value!r:.80}")


def _time(value: Any, place: str) -> float:
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None:
            raise UsageError(
                f"{place}: {value[:80]!r} is not a time",
                hint="write 2026-01-01T00:00:00Z, with its zone",
            )
        # Python 3.11 subtracts the zone within the years 1 to 9999, and fails beyond them.
        seconds = (
            moment.replace(tzinfo=UTC) - _EPOCH - (moment.utcoffset() or _NONE)
        ).total_seconds()
    else:
        seconds = _number(value, "time", place)
    if not 0 <= seconds < _LATEST:
        raise UsageError(f"{place}: {value!r:.80} is not a time between 1970 and 2099")
    return seconds
