"""Parse quantities with units: `90s`, `5.7TB`, `400Gb/s`, `9%/y`, `419/54d`.

A unit is required wherever one is possible: a plan that takes minutes for seconds is wrong by a
factor that nobody sees. Every function raises UsageError, which names the flag and shows the right
form, for a missing or unknown unit, another form, or a number out of range.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from ftckpt.amounts import BARE, DAY, DURATION, HOUR, NUMBER, SECONDS, YEAR, refused, within
from ftckpt.amounts import duration as duration
from ftckpt.amounts import shown_duration as shown_duration
from ftckpt.amounts import size as size_in_bytes
from ftckpt.errors import UsageError

# The upper bound of any plan.
_MOST_BYTES = 1e24

_BITS = rf"({NUMBER})\s*([kKMGTP]?)b(?:/s|ps)"
_COUNT = rf"({NUMBER})\s*([kKMBT]?)"
_MONEY = rf"(\$)?({NUMBER})\s*([A-Z]{{3}})?"
_PER_TIME = rf"({NUMBER})\s*(%?)\s*(?:/\s*(node-)?(h|d|day|y))?"
_FIT = rf"({NUMBER})\s*FIT"
_BIT_UNITS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_COUNT_UNITS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_PERIODS = {"h": HOUR, "d": DAY, "day": DAY, "y": YEAR}


def typed(flag: str, text: str) -> str:
    """Return an option with its value as it was typed."""
    return f"{flag}{'=' if flag.startswith('--set ') else ' '}{text}"


def size(text: str, flag: str) -> float:
    """Return bytes for `512MB`, `1.5GiB`, `5.7TB`; bits are refused."""
    text = text.strip()
    try:
        # `size_in_bytes` also accepts `512M`, and small b as B; here both would hide a mistake.
        if text[-1:] != "B":
            raise UsageError(text)
        return within(float(size_in_bytes(text)), _MOST_BYTES, text, flag)
    except UsageError:
        raise refused(text, flag, "a size", lambda n: f"{n}GB, {n}GiB or {n}TB") from None


def bandwidth(text: str, flag: str) -> float:
    """Return bytes per second for `80GB/s`, `25GiB/s`, or for bits, `400Gb/s`; above zero."""
    text = text.strip()
    match = re.fullmatch(_BITS, text)
    if match is not None:
        value = float(match[1]) * _BIT_UNITS[match[2]] / 8
    elif text.endswith("B/s"):
        value = size(text.removesuffix("/s"), flag)
    else:
        raise refused(text, flag, "a bandwidth", lambda n: f"{n}GB/s, or {n}Gb/s for bits")
    if not value > 0:
        raise UsageError(f"{typed(flag, text)}: nothing can be moved at this bandwidth")
    return within(value, _MOST_BYTES, text, flag)


def share(text: str, flag: str) -> float:
    """Return a fraction in [0, 1] for `5%` or `0.05`."""
    text = text.strip()
    if re.fullmatch(BARE, text.removesuffix("%")) is not None:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        if 0 <= value <= 1:
            return value
    raise UsageError(
        f"{typed(flag, text)}: this is not a share between 0 and 100 %", hint="write 5% or 0.05"
    )


def factor(text: str, flag: str) -> float:
    """Return a positive plain number: a ratio, a multiplier."""
    text = text.strip()
    if re.fullmatch(BARE, text) is None or not 0 < float(text) < math.inf:
        raise UsageError(f"{typed(flag, text)}: this is not a number above zero", hint="write 1.5")
    return float(text)


def count(text: str, flag: str, *, kilo: int = 1000) -> int:
    """Return a whole number above zero: `16384`, `16k`, `70B` (10^9), `405e9`.

    `kilo` is the value of `k`: clusters of GPUs are counted in 1024s.
    """
    text = text.strip()
    match = re.fullmatch(_COUNT, text)
    value = 0.0
    if match is not None:
        value = float(match[1]) * (kilo if match[2] in ("k", "K") else _COUNT_UNITS[match[2]])
    if not 0 < value < 1e18 or value != int(value):
        raise UsageError(
            f"{typed(flag, text)}: this is not a whole number above zero",
            hint="write 16384, 16k or 70B",
        )
    return int(value)


class Money(NamedTuple):
    """An amount and its currency (`USD` if none was named)."""

    amount: float
    currency: str = "USD"


def money(text: str, flag: str) -> Money:
    """Return a price for `2.33`, `$2.33`, `2.10EUR`."""
    text = text.strip()
    match = re.fullmatch(_MONEY, text)
    if match is None or (match[1] and match[3]) or not math.isfinite(float(match[2])):
        raise UsageError(f"{typed(flag, text)}: this is not a price", hint="write 2.33 or 2.33EUR")
    return Money(float(match[2]), match[3] or "USD")


def failure_rate(text: str, flag: str, *, per_node: int = 8, annual: bool = False) -> float:
    """Return failures per second of one component, from any of the usual forms.

    | form | meaning | rate |
    |---|---|---|
    | `50000h` | mean time between failures | 1 / MTBF |
    | `9%/y` | annual failure rate, linear: failures per component and year | AFR / 365 d |
    | `2300FIT` | failures in 10^9 hours | FIT / 10^9 h |
    | `0.0065/node-day` | failures per day of a node with `per_node` components | x / per_node / d |
    | `0.5%/day`, `0.005/day` | failures per day | x / d |

    With `annual` a share without its period (`9%`) is per year, as the flag's name says.
    """
    from . import rates

    text = text.strip()
    forms = (_PER_TIME, _FIT, DURATION)
    in_time, fit, mtbf = (re.fullmatch(form, text) for form in forms)
    if fit is not None:
        value = float(rates.from_fit(float(fit[1])))
    elif mtbf is not None and mtbf[2] in SECONDS:
        seconds = float(mtbf[1]) * SECONDS[mtbf[2]]
        value = float(rates.from_mtbf(seconds)) if seconds > 0 else math.inf
    elif in_time is not None and (in_time[4] or (annual and in_time[2])):
        number = float(in_time[1]) / (100 if in_time[2] else 1)
        value = number / _PERIODS[in_time[4] or "y"] / (per_node if in_time[3] else 1)
    else:
        shown = "{0}h (MTBF), {0}%/y (AFR), {0}FIT or {0}/node-day".format
        raise refused(text, flag, "a failure rate", shown)
    if not 0 < value < math.inf:
        raise UsageError(
            f"{typed(flag, text)}: a failure rate must be above zero and finite",
            hint="leave out what never fails; what fails all the time cannot be planned for",
        )
    return value


class ObservedFailures(NamedTuple):
    """Failures counted over a time in seconds."""

    failures: int
    seconds: float


def observed(text: str, flag: str) -> ObservedFailures:
    """Parse `419/54d`."""
    number, slash, time = text.partition("/")
    if not slash or not number.strip().isdecimal():
        raise UsageError(
            f"{typed(flag, text)}: this is not a number of failures in a time",
            hint="write 419/54d: 419 failures in 54 days",
        )
    seconds = duration(time, flag)
    if not seconds > 0:
        raise UsageError(f"{typed(flag, text)}: failures cannot be counted in no time")
    return ObservedFailures(int(number), seconds)


class Component(NamedTuple):
    """Parts of one kind.

    Attributes:
        number: of parts.
        rate: failures per second of one of them.
    """

    name: str
    number: int
    rate: float


def component(text: str, flag: str, *, per_node: int = 8) -> Component:
    """Parse `nic=2048@100000h`; the rate in any form of `failure_rate`."""
    match = re.fullmatch(r"\s*([^=@\s]+)\s*=([^@]+)@(.+)", text)
    if match is None:
        raise UsageError(
            f"{typed(flag, text)}: this is not a component",
            hint=f"write name=N@RATE: {flag} nic=2048@100000h",
        )
    number = count(match[2], flag, kilo=1024)
    return Component(match[1], number, failure_rate(match[3], flag, per_node=per_node))
