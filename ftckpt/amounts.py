"""Amounts in words: bytes, counts and durations as people read and write them."""

from __future__ import annotations

import re
from collections.abc import Callable

from ftckpt.errors import UsageError

# Units of time in seconds; a year is 365 days, as annual failure rates count it.
SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
HOUR, DAY, YEAR = 3600.0, 86400.0, 365 * 86400.0

# The upper bound of any plan (30 million years).
_MOST_SECONDS = 1e15

# `re` compiles these when they are first used.
NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
BARE = rf"[+-]?{NUMBER}"
DURATION = rf"({NUMBER})\s*([a-z]+)"

_ZERO_PART = r" 00 \w+$|\.0(?= s$)"


def human_bytes(count: int) -> str:
    """Return a byte count in binary units: `0 B`, `1.5 KiB`, `3.2 TiB`."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1023.95:
            break
        value, unit = value / 1024, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def human_count(count: int) -> str:
    """Return a count with the field's own suffixes: `950`, `1.2 K`, `7.0 B` (10^9)."""
    value, unit = float(count), ""
    for larger in ("K", "M", "B", "T"):
        if abs(value) < 999.95:
            break
        value, unit = value / 1000, larger
    return f"{count}" if not unit else f"{value:.1f} {unit}"


def human_duration(seconds: float) -> str:
    """Return a duration: `85 ms`, `4.2 s`, `3 min 05 s`, `2 h 07 min`, `3 d 04 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for large, small, factor, step in (("min", "s", 60, 1), ("h", "min", 3600, 60)):
        if whole < factor * (60 if large == "min" else 24):
            return f"{whole // factor} {large} {whole % factor // step:02d} {small}"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def brief_duration(seconds: float) -> str:
    """Return `human_duration` without parts that are zero: `20 min`, `2 h`, `5 s`."""
    # What was computed may lie a rounding error below the minute that it means.
    return re.sub(_ZERO_PART, "", human_duration(float(f"{seconds:.9g}")))


def decimal_bytes(count: float) -> str:
    """Return bytes in the units in which storage and networks are sold: `80.0 GB`, `5.7 TB`."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB", "PB", "EB"):
        if count < 999.95:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def duration(text: str, flag: str) -> float:
    """Return seconds for `500ms`, `90s`, `5m`, `1.5h`, `54d`; zero needs no unit.

    Every other number needs one: seconds that were meant as minutes delete or wait by a factor that
    nobody sees.

    Raises:
        UsageError: it is not a duration; the message names `flag` and shows the right form.
    """
    text = text.strip()
    if re.fullmatch(r"0+(?:\.0*)?", text):
        return 0.0
    match = re.fullmatch(DURATION, text)
    if match is None or match[2] not in SECONDS:
        raise refused(text, flag, "a duration", lambda n: f"{n}s, {n}m, {n}h or {n}d")
    return within(float(match[1]) * SECONDS[match[2]], _MOST_SECONDS, text, flag)


def shown_duration(seconds: float) -> str:
    """Return a duration in one unit, to three digits, for a sentence: `2.5 h`, `90 s`."""
    unit, length = "s", 1.0
    for larger in ("min", "h", "d"):
        if seconds < 2 * SECONDS[larger]:
            break
        unit, length = larger, SECONDS[larger]
    return f"{seconds / length:.3g} {unit}"


def refused(text: str, flag: str, what: str, forms: Callable[[str], str]) -> UsageError:
    """Return the error for a text without a known unit; it shows the text with a unit."""
    bare = re.fullmatch(BARE, text)
    if bare is not None and not text.startswith(("-", "+")):
        return UsageError(f"{flag} {text}: {what} needs its unit", hint=f"write {forms(text)}")
    return UsageError(f"{flag} {text}: this is not {what}", hint=f"write {forms('10')}")


def within(value: float, most: float, text: str, flag: str) -> float:
    """Return a value; raises UsageError where it is above `most`, or not a number."""
    if not value <= most:
        raise UsageError(f"{flag} {text}: this is beyond any plan")
    return value
