"""Amounts on the command line: durations, with their units."""

from __future__ import annotations

import math
import re

from ftckpt.errors import UsageError
from ftckpt.planning.quantities import SECONDS

# A bare number is seconds here, as `timeout` and `sleep` take it.
_SECONDS = {"": 1.0, **SECONDS}


def parse_duration(text: str, flag: str) -> float:
    """Return seconds for `90`, `90s`, `5m`, `1.5h`, `2d`.

    Raises:
        UsageError: it is no duration; the message names `flag`.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    factor = None if match is None else _SECONDS.get(match[2])
    if match is None or factor is None or not math.isfinite(float(match[1])):
        raise UsageError(
            f"{flag} {text!r} is no duration", hint="write a number with s, m, h or d: 90s, 5m, 2h"
        )
    return float(match[1]) * factor
