"""Laws of the time until the next failure, to draw from.

Times count while the job runs, saves or restarts; the whole platform is as new after each failure.
Means are seconds, > 0.

Parts that age: each of them fails by a Weibull law of its own, and is renewed alone.

    Fleet([AgeingParts("gpu", 16_384, mean=50_000 * 3600, shape=0.7)], rest=1 / (40 * 3600))

All parts are new when a run begins. With a shape below 1 (infant mortality; 0.7 to 0.8 fits large
clusters: Schroeder and Gibson, DSN 2006) the first months see more failures than the mean says,
with one above 1 (wear) fewer. In the long run many parts that are renewed one by one fail nearly
like a Poisson process of the same mean (Palm and Khinchin). A law for the whole platform
(`laws.Weibull`) says something else: there everything is as new after each failure.
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


_MOST = 50_000_000  # next failures held: parts times runs
_AT_ONCE = 64  # failures of a run that are prepared at once, on average


@dataclass(frozen=True, slots=True)
class AgeingParts:
    """Parts of one kind.

    Attributes:
        name: of the component.
        number: of parts, >= 1.
        mean: seconds between failures of one, > 0.
        shape: of its Weibull law, 0.3 to 10.
    """

    name: str
    number: int
    mean: float
    shape: float

    def __post_init__(self) -> None:
        require("the number of parts", self.number, at_least=1, unit="")
        require("the mean time between failures", self.mean, above=0)
        require(f"the Weibull shape of {self.name}", self.shape, at_least=0.3, at_most=10, unit="")


class Fleet:
    """The times between failures of all parts together, and of whatever does not age.

    Args:
        parts: that age.
        rest: failures per second of everything else, exponential.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(self, parts: Sequence[AgeingParts], rest: float = 0.0) -> None:
        require("the failure rate of the rest", rest, at_least=0, unit="per second")
        self.parts, self.rest = tuple(parts), rest

    @property
    def name(self) -> str:
        """Return the name for an answer."""
        ages = ", ".join(f"{p.number:,} {p.name} of Weibull shape {p.shape:g}" for p in self.parts)
        return f"ageing parts: {ages}"

    @property
    def mean(self) -> float:
        """Mean seconds between failures in the long run."""
        return 1 / (self.rest + sum(part.number / part.mean for part in self.parts))

    def sampler(self, rng: np.random.Generator, runs: int) -> Sampler:
        """Follow every part of every run.

        Raises:
            UsageError: that is more than memory should hold.
        """
        import numpy as np

        if runs * sum(part.number for part in self.parts) > _MOST:
            raise UsageError(
                f"{runs:,} runs of this many ageing parts are too many to follow",
                hint="fewer --runs, each with more --set failures-per-run",
            )
        clocks = [_Clocks(part, rng, runs) for part in self.parts]
        ready: list[Floats] = [np.zeros(0) for _ in range(runs)]
        now, until = np.zeros(runs), 0.0

        def prepare() -> None:
            nonlocal until
            end = until + _AT_ONCE * self.mean
            found = [clock.before(end) for clock in clocks]
            others = rng.poisson(self.rest * (end - until), runs)
            owners = np.repeat(np.arange(runs), others)
            found.append((owners, rng.uniform(until, end, len(owners))))
            rows = np.concatenate([each[0] for each in found])
            times = np.concatenate([each[1] for each in found])
            order = np.lexsort((times, rows))
            rows, times = rows[order], times[order]
            bounds = np.searchsorted(rows, np.arange(runs + 1))
            for run in range(runs):
                ready[run] = np.concatenate((ready[run], times[bounds[run] : bounds[run + 1]]))
            until = end

        def draw(events: int) -> Floats:
            nonlocal now
            while min(map(len, ready)) < events:
                prepare()
            times = np.stack([each[:events] for each in ready], axis=1)
            ready[:] = [each[events:] for each in ready]
            gaps: Floats = np.diff(times, axis=0, prepend=now[None, :])
            now = times[-1]
            return gaps

        return draw


class _Clocks:
    """The next failure of each part of one kind, for all runs."""

    def __init__(self, part: AgeingParts, rng: np.random.Generator, runs: int) -> None:
        self._part, self._rng = part, rng
        self._scale = part.mean / math.gamma(1 + 1 / part.shape)
        self._next = self._scale * rng.weibull(part.shape, (runs, part.number))

    def before(self, end: float) -> tuple[npt.NDArray[np.int64], Floats]:
        """Return the failures before a time, as runs and times; each renews its part."""
        import numpy as np

        runs, times = [], []
        due = np.nonzero(self._next < end)
        while len(due[0]):
            at = self._next[due]
            runs.append(due[0])
            times.append(at)
            after = at + self._scale * self._rng.weibull(self._part.shape, len(at))
            self._next[due] = after
            again = after < end
            due = due[0][again], due[1][again]
        if not runs:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        return np.concatenate(runs), np.concatenate(times)
