"""Convert known failure figures to failures per second.

Everything that stops the job counts, and rates of independent causes add up: 1/M = sum of n_i /
mtbf_i. Years have 365 days, as in published annual failure rates. `count` is the number of parts,
>= 0. Every function raises UsageError for an argument that is out of range or not a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftckpt.errors import UsageError
from ftckpt.planning.models.arithmetic import Real, require

from . import exposure

HOUR = 3600.0
DAY = 24 * HOUR
YEAR = 365 * DAY


def from_mtbf(mtbf: Real, count: Real = 1) -> Real:
    """Return count / mtbf; `mtbf` is of one part, in seconds, > 0; infinite if it never fails."""
    require("the mean time between failures", mtbf, above=0, finite=False)
    return _of(count, 1 / mtbf)


def from_afr(afr: Real, count: Real = 1) -> Real:
    """Return the rate for an annual failure rate: failures per part and year of 365 days.

    `afr` is a fraction: 0.02 for 2 %; it may exceed 1.
    """
    require("the annual failure rate", afr, at_least=0, unit="")
    return _of(count, afr / YEAR)


def from_fit(fit: Real, count: Real = 1) -> Real:
    """Return the rate for failures in time: failures per part and 10^9 hours."""
    require("the failures in time", fit, at_least=0, unit="FIT")
    return _of(count, fit / (1e9 * HOUR))


def from_daily(per_day: Real, count: Real = 1) -> Real:
    """Return the rate for failures per part (or node) and day."""
    require("the failures a day", per_day, at_least=0, unit="")
    return _of(count, per_day / DAY)


def _of(count: Real, rate: Real) -> Real:
    require("the number of parts", count, at_least=0, unit="")
    return count * rate


@dataclass(frozen=True, slots=True)
class Cause:
    """One kind of failure.

    Attributes:
        name: of the component.
        per_second: failures that stop the job.
        parts: number of parts that fail so; None where nothing says it.
    """

    name: str
    per_second: float
    parts: int | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """All causes that stop a job, and the sum of their rates."""

    causes: tuple[Cause, ...]
    per_second: float

    @property
    def mtbf(self) -> float:
        """Mean seconds between failures; infinite if nothing fails."""
        return 1 / self.per_second if self.per_second else float("inf")

    @property
    def share(self) -> dict[str, float]:
        """Return each cause's share of all failures; causes of one name together."""
        found: dict[str, float] = {}
        for cause in self.causes:
            part = cause.per_second / self.per_second if self.per_second else 0.0
            found[cause.name] = found.get(cause.name, 0.0) + part
        return found


def combine(causes: Sequence[Cause], burn_in: float = 1.0) -> Rates:
    """Return the combined rates of independent causes.

    `burn_in` is a factor on every rate, > 0. New machines fail more often: parts with a Weibull
    shape of 0.7 fail 1.25 to 1.4 times as often in their first month.

    Raises:
        UsageError: no cause is given, or a rate is out of range or not a number.
    """
    if not causes:
        raise UsageError("nothing says how often the job fails")
    require("the burn-in factor", burn_in, above=0, unit="")
    for cause in causes:
        require(f"the failure rate of {cause.name}", cause.per_second, at_least=0,
                unit="per second")  # fmt: skip
    scaled = tuple(Cause(c.name, c.per_second * burn_in, c.parts) for c in causes)
    return Rates(scaled, sum(cause.per_second for cause in scaled))


@dataclass(frozen=True, slots=True)
class Observed:
    """A counted rate, and its confidence limits.

    Attributes:
        seconds: of observation.
        confidence: of the limits.
        per_second: the rate, failures / seconds.
        low: lower limit of the rate; 0 without failures.
        high: upper limit of the rate.
    """

    failures: int
    seconds: float
    confidence: float
    per_second: float
    low: float
    high: float


def observed(failures: int, seconds: float, confidence: float = 0.95) -> Observed:
    """Return the rate of counted failures, with exact Poisson limits.

    419 failures in 54 days are one in 3.09 h, with 95 % limits of 2.81 and 3.41 h. The interval
    goes with the square root: 30 % in the rate are 15 % there. `seconds` > 0; `confidence` in (0,
    1).
    """
    require("the time of observation", seconds, above=0)
    low, high = exposure.mean_limits(failures, confidence)
    return Observed(
        failures, seconds, confidence, failures / seconds, low / seconds, high / seconds
    )
