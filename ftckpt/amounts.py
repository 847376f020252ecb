"""Amounts in words: bytes, counts and durations as people read them."""

from __future__ import annotations

import re

_ZERO_PART = re.compile(r" 00 \w+$|\.0(?= s$)")


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
    return _ZERO_PART.sub("", human_duration(float(f"{seconds:.9g}")))


def decimal_bytes(count: float) -> str:
    """Return bytes in the units in which storage and networks are sold: `80.0 GB`, `5.7 TB`."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB", "PB", "EB"):
        if count < 999.95:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
