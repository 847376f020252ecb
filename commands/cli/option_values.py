"""What the values of options must be: durations with their units, and files that can be written."""

from __future__ import annotations

import math
import os
import re

from ftckpt.errors import UsageError
from ftckpt.planning.quantities import SECONDS
from ftckpt.storage.suggestions import existing, hint_for_place

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


def require_folder(option: str, path: str) -> None:
    """Refuse a file in a directory that is not there: a typing error would make a tree.

    Args:
        option: that names it, with its dashes.
        path: as typed.

    Raises:
        UsageError: the directory does not exist, or it is a URL.
    """
    if "://" in path:
        raise UsageError(f"{option} {path}: it is written on this machine", hint="name a path")
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        blocked = not os.path.isdir(there := existing(folder))
        raise UsageError(
            f"{there if blocked else folder} is not a directory, and {option} {path} goes there",
            hint=hint_for_place(path),
        )
