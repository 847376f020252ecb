"""What the values of options must be: durations with their units, and files that can be written."""

from __future__ import annotations

import math
import os
import re

from ftckpt.amounts import SECONDS
from ftckpt.errors import UsageError

# A bare number is seconds here, as `timeout` and `sleep` take it.
_SECONDS = {"": 1.0, **SECONDS}


def parse_duration(text: str, flag: str) -> float:
    """Return seconds for `90`, `90s`, `5m`, `1.5h`, `2d`.

    Raises:
        UsageError: it is not a duration; the message names `flag`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    factor = None if match is None else _SECONDS.get(match[2])
    if match is None or factor is None or not math.isfinite(float(match[1])):
        raise UsageError(
            f"{flag} {text!r} is not a duration",
            hint="write a number with s, m, h or d: 90s, 5m, 2h",
        )
    return float(match[1]) * factor


def check_file(option: str, path: str) -> None:
    """Refuse a file that cannot be written, before anything is computed.

    Missing directories above it are made when it is written, as `copy` and `convert` make
    those above a destination.

    Args:
        option: that names it, with its dashes.
        path: as typed.

    Raises:
        UsageError: it is a URL, or looks like one, or leads through a file.
    """
    if "://" in path:
        raise UsageError(f"{option} {path}: it is written on this machine", hint="name a path")
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        from ftckpt.storage.suggestions import existing, hint_for_slip

        there = existing(folder)
        slip = hint_for_slip(path)
        if slip or not os.path.isdir(there):
            wrong = folder if slip else there
            raise UsageError(
                f"{wrong} is not a directory, and {option} {path} goes there", hint=slip
            )
