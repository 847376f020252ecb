"""Laws of the time until the next failure, to draw from.

Times count while the job runs, saves or restarts; the whole platform is as new after each failure.
Means are seconds, > 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ftckpt.errors import UsageError
from ftckpt.planning.models.arithmetic import require

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float64]
    Sampler: TypeAlias = Callable[[int], Floats]  # events -> times of shape (events, runs)


class Law(Protocol):
    """A law of times between failures."""

    @property
    def name(self) -> str:
        """Name and parameters, for an answer."""

    @property
    def mean(self) -> float:
        """Mean seconds between failures."""

    def sampler(self, rng: np.random.Generator, runs: int) -> Sampler:
        """Return a function that draws the next times of each run, one row per event."""


@dataclass(frozen=True, slots=True)
class Exponential:
    """Failures without memory."""

    mean: float

    def __post_init__(self) -> None:
        require("the mean time between failures", self.mean, above=0)

    @property
    def name(self) -> str:
        """Return the name for an answer."""
        return "exponential failures"

    def sampler(self, rng: np.random.Generator, runs: int) -> Sampler:
        """Draw by numpy's ziggurat method."""
        return lambda events: rng.exponential(self.mean, (events, runs))


@dataclass(frozen=True, slots=True)
class Weibull:
    """Failures in bunches (shape k below 1: a falling hazard) or by wear (above 1).

    k of 0.7 to 0.8 fits large clusters (Schroeder and Gibson, 2006).
    """

    mean: float
    shape: float

    def __post_init__(self) -> None:
        require("the mean time between failures", self.mean, above=0)
        require("the Weibull shape", self.shape, at_least=0.05, at_most=100, unit="")

    @property
    def name(self) -> str:
        """Return the name for an answer."""
        return f"Weibull failures of shape {self.shape:g}"

    def sampler(self, rng: np.random.Generator, runs: int) -> Sampler:
        """Draw times of scale mean / Gamma(1 + 1/k)."""
        scale = self.mean / math.gamma(1 + 1 / self.shape)
        return lambda events: scale * rng.weibull(self.shape, (events, runs))


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Times whose natural logarithm is normal, with standard deviation `sigma` > 0."""

    mean: float
    sigma: float

    def __post_init__(self) -> None:
        require("the mean time between failures", self.mean, above=0)
        require("sigma of the lognormal", self.sigma, above=0, at_most=10, unit="")

    @property
    def name(self) -> str:
        """Return the name for an answer."""
        return f"lognormal failures of sigma {self.sigma:g}"

    def sampler(self, rng: np.random.Generator, runs: int) -> Sampler:
        """Draw times with mu = log(mean) - sigma^2 / 2."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return lambda events: rng.lognormal(mu, self.sigma, (events, runs))


class Trace:
    """Observed times, replayed in their order from a random place, cyclically."""

    def __init__(self, gaps: Sequence[float]) -> None:
        """Take observed times: seconds from each failure to the next, each > 0.

        Raises:
            UsageError: there are none, or one is not above 0.
        """
        if not gaps:
            raise UsageError("the trace holds no failure")
        for gap in gaps:
            require("a time in the trace", gap, above=0)
        self.gaps = tuple(float(gap) for gap in gaps)

    @property
    def name(self) -> str:
        """Return the name for an answer."""
        return f"trace of {len(self.gaps)} failures"

    @property
    def mean(self) -> float:
        """Mean seconds between failures."""
        return math.fsum(self.gaps) / len(self.gaps)

    def sampler(self, rng: np.random.Generator, runs: int) -> Sampler:
        """Start each run at its own random place."""
        import numpy as np

        gaps = np.array(self.gaps)
        at = rng.integers(len(gaps), size=runs)

        def draw(events: int) -> Floats:
            nonlocal at
            rows = (at + np.arange(events)[:, None]) % len(gaps)
            at = (at + events) % len(gaps)
            drawn: Floats = gaps[rows]
            return drawn

        return draw
