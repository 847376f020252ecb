"""Combine known failure rates, with error bars.

Confidence limits of counted failures carry over to every result; a given rate counts as exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ftckpt.errors import UsageError

from . import rates
from .quantities import shown_duration


@dataclass(frozen=True, slots=True)
class Counted:
    """Counted failures.

    Attributes:
        name: of the cause.
        failures: their number.
        seconds: of observation, for a job of the planned size.
        detect: seconds after each of them in which nothing else could fail.
        dispersion: by how much their number scatters more than a Poisson number (`poisson`); >= 1.
    """

    name: str
    failures: int
    seconds: float
    detect: float = 0.0
    dispersion: float = 1.0

    @property
    def exposed(self) -> float:
        """Return the seconds in which the job could fail.

        Raises:
            UsageError: there are none left.
        """
        exposed = self.seconds - self.failures * self.detect
        if exposed > 0:
            return exposed
        raise UsageError(
            f"the detection of {self.failures:,} failures, {shown_duration(self.detect)} each, "
            f"takes all of the {shown_duration(self.seconds)} in which they were counted",
            hint="check the units; --detect is the mean from a failure until it is noticed",
        )


@dataclass(frozen=True, slots=True)
class Failures:
    """All failures of a job.

    Attributes:
        rates: causes, the most frequent first, and their sum; burn-in included.
        confidence: of the limits; None without a count.
        low: failures per second at the lower limit.
        high: failures per second at the upper limit.
        dispersion: the largest of the counts: the limits are wider by its square root.
    """

    rates: rates.Rates
    confidence: float | None
    low: float
    high: float
    dispersion: float = 1.0

    @property
    def mtbf(self) -> float:
        """Mean seconds between failures."""
        return self.rates.mtbf

    @property
    def mtbf_limits(self) -> tuple[float, float]:
        """Mean seconds between failures at the limits, the shorter first."""
        return 1 / self.high, 1 / self.low if self.low > 0 else float("inf")


def combine(
    known: Sequence[rates.Cause],
    counted: Sequence[Counted] = (),
    *,
    burn_in: float = 1.0,
    confidence: float = 0.95,
) -> Failures:
    """Combine a job's failures; rates of independent causes add up.

    Args:
        known: causes with a given rate.
        counted: causes with counted failures.
        burn_in: factor on every rate, > 0.
        confidence: of the limits, in (0, 1).

    Raises:
        UsageError: no cause is given, none of them ever failed, or a number is out of range.
    """
    seen = [rates.observed(c.failures, c.exposed, confidence) for c in counted]
    # Counts in the same time are one count: a sum of Poisson numbers is one, and its limits are
    # closer together than those of its parts added up.
    together: dict[float, int] = {}
    for one in seen:
        together[one.seconds] = together.get(one.seconds, 0) + one.failures
    pooled = [rates.observed(number, time, confidence) for time, number in together.items()]
    found = [rates.Cause(c.name, o.per_second) for c, o in zip(counted, seen, strict=True)]
    causes = sorted([*known, *found], key=lambda cause: -cause.per_second)
    hint = "--gpus 16384 --gpu-mtbf 50000h, --mtbf 3.1h, --failures 419/54d, or --preset llama3"
    if not causes:
        raise UsageError("nothing says how often the job fails", hint=hint)
    total = rates.combine(causes, burn_in)
    if not total.per_second > 0:
        raise UsageError("nothing ever fails, so that nothing says how often to save", hint=hint)
    low = total.per_second - burn_in * sum(o.per_second - o.low for o in pooled)
    high = total.per_second + burn_in * sum(o.high - o.per_second for o in pooled)
    scatter = max((c.dispersion for c in counted), default=1.0)
    if scatter > 1 and low > 0:  # on the scale of factors, so that no limit is below zero
        wider = math.sqrt(scatter)
        low = total.per_second * (low / total.per_second) ** wider
        high = total.per_second * (high / total.per_second) ** wider
    return Failures(total, confidence if counted else None, low, high, scatter)
