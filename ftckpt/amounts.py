"""Amounts in words: bytes, counts and durations as people read and write them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TypeAlias

from ftckpt.errors import UsageError

# What an operation takes: a number, in bytes, bytes a second, seconds or a part of one, or a text.
Size: TypeAlias = int | str
Rate: TypeAlias = float | str
Duration: TypeAlias = float | str
Share: TypeAlias = float | str

# Units of time in seconds; a year is 365 days, as annual failure rates count it.
SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
HOUR, DAY, YEAR = 3600.0, 86400.0, 365 * 86400.0

# The upper bound of any plan (30 million years).
_MOST_SECONDS = 1e15

# No filesystem holds so much; beyond it a float may be infinite.
_MOST_BYTES = 1 << 63

# `re` compiles these when they are first used.
NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
BARE = rf"[+-]?{NUMBER}"
DURATION = rf"({NUMBER})\s*([a-z]+)"

_SIZE = r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kmgtp]?)(i?b?)\s*"
_POWERS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}

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


def seconds(value: Duration, flag: str) -> float:
    """Return a duration in seconds, of a number of them or of a text with its unit.

    Raises:
        UsageError: as `duration`.
    """
    return duration(value, flag) if isinstance(value, str) else float(value)


def size(value: Size) -> int:
    """Return a number of bytes, of itself or of a text: `4096`, `512M`, `1GiB`, `1.5GB`.

    `MB` counts in thousands; `MiB` and a bare `M` in 1024s, as other storage tools do.

    Raises:
        UsageError: it is not a size.
    """
    if not isinstance(value, str):
        return int(value)
    found = _bytes(value)
    if not found < _MOST_BYTES:
        raise UsageError(f"{value[:40]!r} is more than any filesystem holds")
    return int(found)


def _bytes(value: str) -> float:
    match = re.fullmatch(_SIZE, value, re.IGNORECASE)
    number, unit, suffix = match.groups() if match else ("0", "", "i")
    if suffix.lower() == "i" or (suffix.lower() == "ib" and not unit):
        raise UsageError(f"{value!r} is not a size in bytes", hint="write 512M, 1GiB or 1.5GB")
    power = _POWERS[unit.lower()]
    scale = 1000 ** (power // 10) if suffix.lower() == "b" else 1 << power
    return float(number) * scale


def rate(value: Rate) -> float | None:
    """Return bytes a second, of a number or of `200MiB/s`, `1GiB`, `50M/s`; None for 0 and "".

    Raises:
        UsageError: it is not a rate, or zero, or lacks a unit: 200 would mean a few bytes a second.
    """
    if not isinstance(value, str) or not value:
        return float(value) if value else None
    if re.fullmatch(r"\s*[\d.]+\s*(/s|ps)?\s*", value, flags=re.IGNORECASE):
        raise UsageError(f"{value!r}: a rate needs its unit", hint="write 200MiB/s or 500B/s")
    found = size(re.sub(r"\s*(/s|ps)\s*$", "", value, flags=re.IGNORECASE))
    if found <= 0:
        raise UsageError(f"{value!r} allows nothing to be read", hint="write a rate: 200MiB/s")
    return float(found)


def share(value: Share) -> float:
    """Return a share in (0, 1], of itself or of `5%` or `0.05`.

    Raises:
        UsageError: it is none.
    """
    text = str(value).strip()
    percent = text.endswith("%")
    try:
        found = float(text.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        found = math.nan
    if not 0 < found <= 1:
        raise UsageError(
            f"{str(value)!r} is not a share between 0 and 100 %", hint="write 5% or 0.05"
        )
    return found


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
