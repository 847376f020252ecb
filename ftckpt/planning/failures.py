"""Combine what is known of failures into rates with error bars.

Of failures that were counted, the confidence limits are carried on to everything that follows from
them; a rate that was given as such is taken to be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftckpt.errors import UsageError

from . import rates
from .quantities import shown_duration


@dataclass(frozen=True, slots=True)
class Counted:
    """Failures that were counted.

    Attributes:
        name: of the cause.
        failures: how many.
        seconds: over how long, of a job of the size that is planned for.
        detect: seconds after each of them in which nothing else could fail.
    """

    name: str
    failures: int
    seconds: float
    detect: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds in which the job could fail.

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
    """What stops a job.

    Attributes:
        rates: causes, the most frequent first, and their sum; burn-in included.
        confidence: of the limits; None where nothing was counted.
        low: failures a second at the lower limit.
        high: failures a second at the upper limit.
    """

    rates: rates.Rates
    confidence: float | None
    low: float
    high: float

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
    """Add up what stops a job; independent causes add their rates.

    Args:
        known: causes whose rate is given.
        counted: causes whose failures were counted.
        burn_in: factor on every rate, > 0.
        confidence: of the limits, in (0, 1).

    Raises:
        UsageError: no cause is given, none of them ever failed, or a number is out of range.
    """
    seen = [rates.observed(c.failures, c.exposed, confidence) for c in counted]
    found = [rates.Cause(c.name, o.per_second) for c, o in zip(counted, seen, strict=True)]
    causes = sorted([*known, *found], key=lambda cause: -cause.per_second)
    hint = "--gpus 16384 --gpu-mtbf 50000h, --mtbf 3.1h, --failures 419/54d, or --preset llama3"
    if not causes:
        raise UsageError("nothing says how often the job fails", hint=hint)
    total = rates.combine(causes, burn_in)
    if not total.per_second > 0:
        raise UsageError("nothing ever fails, so that nothing says how often to save", hint=hint)
    return Failures(
        total,
        confidence if counted else None,
        total.per_second - burn_in * sum(o.per_second - o.low for o in seen),
        total.per_second + burn_in * sum(o.high - o.per_second for o in seen),
    )
