"""Read a run's own log of saves and failures, one JSON object per line.

    {"event": "save", "time": 1767225600, "step": 1000, "seconds": 61.2, "bytes": 5.7e12}
    {"event": "save", "time": "2026-01-01T00:20:00Z", "snapshot": 1.6, "flush": 58.0}
    {"event": "failure", "time": 1767230000, "class": "gpu", "detect": 95, "restart": 480}
    {"event": "step", "step": 1001, "seconds": 4.1}
    {"event": "start", "time": 1767225600}
    {"event": "end", "time": 1769817600}

`time` is seconds since the epoch or ISO 8601 with its zone; every duration is in seconds. The time
of a failure is when it struck. `start` and `end` bound the time in which failures were counted;
without them it is from the first time in the log to the last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from statistics import fmean, median
from typing import Any

from ftckpt.errors import UsageError
from ftckpt.strict_json import JsonError, decode

from .exposure import LogEvent, exposure

# Longer lines are not events.
_LINE = 1 << 16


@dataclass(frozen=True, slots=True)
class RunLog:
    """The content of a log, in seconds and bytes; None for what it lacks.

    Attributes:
        saves: their number.
        failures: their number.
        classes: failures by the log's class, "" without one.
        span_s: from the start to the end, or from the first time to the last.
        exposed_s: the part of it in which the job could fail: without detection, restarts and the
            time between an end and the next start.
        exposed_failures: failures in that part.
        save_s: mean time that training waited for a save.
        snapshot_s: mean blocking part of background saves.
        flush_s: mean background part.
        nbytes: of the newest save.
        detect_s: mean from a failure until it was noticed.
        restart_s: mean from there until training continued.
        step_s: median of a step.
        ignored: number of lines with other events.
    """

    saves: int = 0
    failures: int = 0
    classes: Mapping[str, int] = field(default_factory=dict)
    span_s: float | None = None
    exposed_s: float | None = None
    exposed_failures: int = 0
    save_s: float | None = None
    snapshot_s: float | None = None
    flush_s: float | None = None
    nbytes: float | None = None
    detect_s: float | None = None
    restart_s: float | None = None
    step_s: float | None = None
    ignored: int = 0


# Numeric fields of each event, none of them below zero.
_NUMBERS = {
    "save": ("seconds", "snapshot", "flush", "bytes"),
    "failure": ("detect", "restart"),
    "step": ("seconds",),
    "start": (),
    "end": (),
}


def read_log(
    lines: Iterable[str], name: str, *, detect: float | None = None, restart: float | None = None
) -> RunLog:
    """Read a log; empty lines are skipped, other events counted.

    Args:
        lines: each a JSON object with an `event`.
        name: of the log, for messages.
        detect: seconds for failures that record none; default: the mean of those that do.
        restart: the same for restarts.

    Raises:
        UsageError: names the line that is not such an object, or the value that is not a number.
    """
    numbers: dict[tuple[str, str], list[float]] = {}
    events: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    times: list[float] = []
    history: list[LogEvent] = []
    bounds: dict[str, float] = {}
    for place, event in _records(lines, name):
        kind = event["event"]
        if kind not in _NUMBERS:
            events["other"] += 1
            continue
        events[kind] += 1
        time = None
        if "time" in event:
            time = _time(event["time"], place)
            times.append(time)
            bounds[kind] = min(time, bounds.get(kind, time)) if kind == "start" else time
        for key in _NUMBERS[kind]:
            if key in event:
                event[key] = _number(event[key], key, place)
                numbers.setdefault((kind, key), []).append(event[key])
        if kind == "failure":
            classes[str(event.get("class", ""))] += 1
            history.append(LogEvent(kind, time, event.get("detect"), event.get("restart")))
        elif time is not None:
            history.append(LogEvent(kind, time))

    def mean(kind: str, key: str) -> float | None:
        found = numbers.get((kind, key))
        return fmean(found) if found else None

    span = None
    if times:
        span = bounds.get("end", max(times)) - bounds.get("start", min(times))
        if span < 0:
            raise UsageError(f"{name} ends before it starts")
    exposed = exposure(history, detect=detect, restart=restart)
    sizes, steps = numbers.get(("save", "bytes")), numbers.get(("step", "seconds"))
    return RunLog(
        saves=events["save"],
        failures=events["failure"],
        classes=dict(classes.most_common()),
        span_s=span or None,
        exposed_s=exposed.seconds or None,
        exposed_failures=exposed.failures if exposed.seconds else 0,
        save_s=mean("save", "seconds"),
        snapshot_s=mean("save", "snapshot"),
        flush_s=mean("save", "flush"),
        nbytes=sizes[-1] if sizes else None,
        detect_s=mean("failure", "detect"),
        restart_s=mean("failure", "restart"),
        step_s=median(steps) if steps else None,
        ignored=events["other"],
    )


def _records(lines: Iterable[str], name: str) -> Iterable[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        place = f"line {number} of {name}"
        if len(line) > _LINE:
            raise UsageError(f"{place} is longer than any event")
        if not line.strip():
            continue
        try:
            record = decode(line)
        except JsonError as error:
            raise UsageError(f"{place} {error}") from error
        if not isinstance(record, dict) or not isinstance(record.get("event"), str):
            raise UsageError(
                f"{place} is not an event", hint='write {"event": "save", "seconds": 61}'
            )
        yield place, record


def _number(value: Any, key: str, place: str) -> float:
    # JSON's true is Python's 1, and an integer may be too large for a float.
    if type(value) in (int, float) and 0 <= value < 1e300 and math.isfinite(value):
        return float(value)
    raise UsageError(f"{place}: {key} is not a number of seconds or bytes: {value!r}")


def _time(value: Any, place: str) -> float:
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
        if moment is None or moment.tzinfo is None:
            raise UsageError(
                f"{place}: {value!r} is not a time",
                hint="write 2026-01-01T00:00:00Z, with its zone",
            )
        return moment.timestamp()
    return _number(value, "time", place)
