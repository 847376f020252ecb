"""Read logs of other programs: JSON lines with a step, or text matched by an expression.

They hold numbers as rounded in print, and no state. So equality means equality to that precision,
and a difference names no component; the answer says both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ftckpt.errors import NotFoundError, UnsupportedError, UsageError
from ftckpt.replay.record.log import LONGEST_LINE, SCHEMA, Log, StepRecord, read_log

# `step 12 loss 2.31`, `iteration 12/ 100 | lm loss: 2.3E+00 |`, `{'step': 12, 'loss': 2.31}`.
CONSOLE = (
    r"(?i:\b(?:step|iteration|iter)\b)\D{1,20}(?P<step>\d+).*?"
    r"(?i:loss)\D{0,6}?(?P<loss>[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))"
)
_STEPS = ("step", "global_step", "iteration", "iter")
_RATES = ("lr", "learning_rate", "learning rate")


def read_any(path: Path, pattern: str = "", name: str = "") -> Log:
    """Read a log of ftckpt, JSON lines of another program, or text.

    Args:
        path: a directory of ftckpt's logs, or a file.
        pattern: a regular expression with a group `step`, and one for each number; "" tries JSON
            lines first and then `CONSOLE`.
        name: of the run, for answers.

    Raises:
        NotFoundError: the log does not exist.
        UsageError: the pattern cannot be used.
        UnsupportedError: no line of it shows a step.
        CorruptError: a log of ftckpt's is damaged.
    """
    if path.is_dir() or _is_ours(path):
        return read_log(path, name)
    try:
        found = re.compile(pattern or CONSOLE)
    except re.error as error:
        raise UsageError(f"--pattern is not a regular expression: {error}") from error
    if "step" not in found.groupindex:
        raise UsageError("--pattern has no group for the step", hint=r"(?P<step>\d+)")
    steps: dict[int, StepRecord] = {}
    digits, again = 0, 0
    for text in _lines(path):
        row = None if pattern else _from_json(text)
        row = _from_text(text, found) if row is None else row
        if row is None:
            continue
        step, values = row
        again += step in steps
        digits = max([digits, *(len(re.sub(r"[eE].*|\D", "", v)) for v in values.values())])
        steps[step] = StepRecord(step, 0, _events(values))
    if not steps:
        raise UnsupportedError(
            f"no line of {path} shows a step with a number",
            hint=r"say how they look: --pattern 'step (?P<step>\d+).*loss (?P<loss>\S+)'",
        )
    limits = [f"numbers as they were printed, {digits} digits at the most; no state"]
    if again:
        limits.append(f"{again} steps stand in it more than once; the last of each was taken")
    return Log(name or path.name, {0: steps}, None, tuple(limits))


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while text := file.readline(LONGEST_LINE):
                yield text
    except FileNotFoundError as error:
        raise NotFoundError(f"no log at {path}") from error


def _is_ours(path: Path) -> bool:
    return next((f'"{SCHEMA}"' in text for text in _lines(path)), False)


def _from_json(text: str) -> tuple[int, dict[str, str]] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        body = json.loads(text, parse_float=str, parse_int=str, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    key = next((key for key in _STEPS if str(body.get(key, "")).isdecimal()), None)
    if key is None:
        return None
    values = {k: v for k, v in body.items() if k != key and isinstance(v, str) and _is_number(v)}
    return int(body[key]), values


def _from_text(text: str, found: re.Pattern[str]) -> tuple[int, dict[str, str]] | None:
    match = found.search(text)
    if match is None or not match["step"].isdecimal():
        return None
    named = {k: v for k, v in match.groupdict().items() if k != "step" and v is not None}
    return int(match["step"]), {k: v for k, v in named.items() if _is_number(v)}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _events(values: Mapping[str, str]) -> dict[str, dict[str, str]]:
    events: dict[str, dict[str, str]] = {}
    for name, text in values.items():
        event = "loss" if name in ("loss", "lm loss", "train_loss") else "metric"
        event = "lr" if name in _RATES else event
        events.setdefault(event, {})[name] = f"decimal {text}"
    return events
