"""Convert an interval in seconds to a number of steps for a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .arithmetic import Real, require


@dataclass(frozen=True, slots=True)
class RoundedInterval:
    """An interval in whole steps.

    Attributes:
        exact: steps without rounding.
        steps: rounded.
        interval: seconds of work in those steps.
        goodput_lost: goodput lost by rounding, as a fraction; below 0 if rounding helps.
    """

    exact: float
    steps: int
    interval: float
    goodput_lost: float


def to_steps(
    interval: float, step_time: float, goodput: Callable[[float], Real], least: float = 0.0
) -> RoundedInterval:
    """Round an interval to a memorable number of steps.

    To the nearest multiple of 1, 2 or 5 times a power of ten that is at most a tenth of it, so that
    it moves by 5 % at most from ten steps on; never below one step, nor below `least` seconds, the
    time of a flush. `step_time` is in seconds, > 0; `goodput` gives an interval's goodput.
    """
    require("the interval", interval, above=0)
    require("the step time", step_time, above=0)
    require("the least interval", least, at_least=0)
    exact = interval / step_time
    grain = _grain(exact)
    steps = max(grain, round(exact / grain) * grain)
    while steps * step_time < least * (1 - 1e-12):
        steps += grain
    rounded = steps * step_time
    return RoundedInterval(exact, steps, rounded, float(goodput(interval) - goodput(rounded)))


def _grain(steps: float) -> int:
    """Return the largest of 1, 2, 5, 10, 20, ... that is at most a tenth of `steps`."""
    grain = 1
    power = 1
    while power * 10 <= steps:
        grain = max(g * power for g in (1, 2, 5) if g == 1 or g * power * 10 <= steps)
        power *= 10
    return grain
