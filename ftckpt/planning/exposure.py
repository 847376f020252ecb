"""Compute from a log how long a job could fail, and how often it did.

From a failure until it is noticed and repaired nothing else can fail, so this time says nothing
about the failure rate. Counted as exposure it makes failures look rarer: by a sixth with a
detection of 30 minutes and a failure every 3 hours.

Restarts count neither way. Some logs contain the failures that strike a restart, others cannot;
without restarts and those failures the rate is right for both.

Exact confidence limits of a Poisson mean, and whether events are Poisson's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from ftckpt.errors import UsageError
from ftckpt.planning.models.arithmetic import require

# In logs with whole seconds, a failure that cuts a restart short may lie this far behind its end.
_ROUNDED = 1.0


class LogEvent(NamedTuple):
    """An event of a log.

    Attributes:
        kind: `start`, `end`, `failure`; anything else shows that the job ran.
        time: in seconds; None if the log has none. For a failure: when it struck.
        detect: seconds from a failure until it was noticed and repaired; None if unknown.
        restart: seconds from there until training continued; None if unknown.
    """

    kind: str
    time: float | None
    detect: float | None = None
    restart: float | None = None


class Exposure(NamedTuple):
    """The data for a failure rate.

    Attributes:
        seconds: in which the job could fail.
        failures: in this time.
    """

    seconds: float
    failures: int


def exposure(
    events: Sequence[LogEvent], *, detect: float | None = None, restart: float | None = None
) -> tuple[Exposure, list[bool]]:
    """Return how long a job could fail, how many failures struck in that time, and which events.

    The job can fail from a `start` (or the first event, if no start precedes it) to an `end` (or
    the last event), and again after the restart of a failure. A `start` without an `end` before it
    means that the job stopped at the previous event. A failure that opens the log is not counted.

    Args:
        events: in any order. Failures without a time are counted, less their detection.
        detect: seconds for failures that record none; default: the mean of those that do.
        restart: the same for restarts.

    Returns:
        The exposure, and for each event whether it is a failure that counts towards it.
    """
    counted = [False] * len(events)
    failures = [event for event in events if event.kind == "failure"]
    detects = [event.detect for event in failures if event.detect is not None]
    restarts = [event.restart for event in failures if event.restart is not None]
    if detect is None:
        detect = fmean(detects) if detects else 0.0
    if restart is None:
        restart = fmean(restarts) if restarts else 0.0
    clock = _Clock()
    untimed: list[float] = []
    timed: list[tuple[float, str, float, int]] = []
    for place, event in enumerate(events):
        noticed = detect if event.detect is None else event.detect
        if event.time is not None:
            gone = noticed + (restart if event.restart is None else event.restart)
            timed.append((event.time, event.kind, event.time + gone, place))
        elif event.kind == "failure":
            untimed.append(noticed)
            counted[place] = True
    for time, kind, up, place in sorted(timed, key=lambda one: one[0]):
        before = clock.failures
        clock.pass_(kind, time, up)
        counted[place] = clock.failures > before
    clock.close(clock.last)
    seconds = max(0.0, clock.seconds - sum(untimed))
    return Exposure(seconds, clock.failures + len(untimed)), counted


class _Clock:
    """Runs while the job can fail; takes events in the order of their times."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.failures = 0
        self.last = float("-inf")
        self._since: float | None = None  # the clock runs from here, which may be in the future
        self._ended = float("-inf")
        self._down = False  # only starts came after a failure

    def pass_(self, kind: str, time: float, up: float) -> None:
        """Process an event; `up` is when training continues after a failure."""
        if kind == "start":
            if not self._down:
                self.close(self.last)
            self._since = time if self._since is None else max(time, self._since)
        elif kind == "end":
            self.close(time)
            self._ended, self._down = time, False
        elif kind == "failure":
            self._fail(time, up)
        else:
            self._since = time if self._since is None else self._since
            self._down = False
        self.last = time

    def close(self, time: float) -> None:
        """Stop the clock."""
        if self._since is not None:
            self.seconds += max(0.0, time - self._since)
        self._since = None

    def _fail(self, time: float, up: float) -> None:
        if self._since is None:
            # A process may write `end` while it dies, before the failure is logged.
            self.failures += time <= self._ended + _ROUNDED
        elif self._down and self._since > self.last and time <= self._since + _ROUNDED:
            up = max(up, self._since)  # it struck while the job was down
        else:
            self.close(time)
            self.failures += 1
        self._since, self._down = up, True


_FEWEST = 16  # events whose clusters can be told from chance


def mean_limits(count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the confidence limits of the mean number of events, when `count` were seen.

    Garwood's exact limits (Biometrika 28, 1936): half the chi-square quantiles of 2 n and 2 n + 2
    degrees of freedom. 0 and 3.69 for no event at 95 %, 381 and 461 for 419. Relative error below
    1e-9.

    Raises:
        UsageError: the count is negative or not whole, or the confidence is not in (0, 1).
    """
    if not isinstance(count, int) or count < 0:
        raise UsageError(f"the number of failures must be a whole number, but is {count}")
    require("the confidence", confidence, above=0, at_most=1 - 1e-12, unit="")
    return _limits(count, confidence)


@lru_cache(4096)
def _limits(count: int, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    wide = 10 + 2 * -math.log(tail)
    above = count + wide * (math.sqrt(count) + wide)
    below = max(0.0, count - wide * math.sqrt(count))
    low = _crossing(lambda mean: at_least(count, mean) - tail, below, count) if count else 0.0
    return low, _crossing(lambda mean: at_least(count + 1, mean) - (1 - tail), count, above)


def dispersion(times: Sequence[float], seconds: float) -> float:
    """Return by what factor the number of events scatters more than a Poisson number would; >= 1.

    The index of dispersion (variance over mean) of counts in windows of four events on average
    (Fisher, 1925; Cox and Lewis, 1966, chapter 7). 1 where chance explains the scatter, one-sided
    at 95 %, and below 16 events, of which nobody can tell.

    Args:
        times: of the events, seconds from the begin of the observation.
        seconds: of observation.
    """
    if len(times) < _FEWEST or not seconds > 0:
        return 1.0
    windows = len(times) // 4
    counts = [0] * windows
    for time in times:
        counts[min(windows - 1, max(0, int(time / seconds * windows)))] += 1
    mean = len(times) / windows
    index = sum((count - mean) ** 2 for count in counts) / (mean * (windows - 1))
    return index if index > 1 + 1.645 * math.sqrt(2 / (windows - 1)) else 1.0


def at_least(count: int, mean: float) -> float:
    """Return the probability of `count` (>= 1) or more events with mean `mean`.

    It is the regularised incomplete gamma function P(count, mean): by its series below the mode,
    and by its continued fraction above (Abramowitz and Stegun, 6.5.29 and 6.5.31).
    """
    if mean <= 0:
        return 0.0
    weight = math.exp(count * math.log(mean) - mean - math.lgamma(count))
    if mean < count + 1:
        term = total = 1 / count
        k = count
        while term > total * 1e-17:
            k += 1
            term *= mean / k
            total += term
        return weight * total
    # Lentz's method evaluates the fraction from its front.
    b = mean + 1 - count
    c, d = math.inf, 1 / b
    fraction = d
    for k in range(1, 10_000_000):
        a = -k * (k - count)
        b += 2
        d = 1 / (a * d + b)
        c = b + a / c
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return 1 - weight * fraction


def _crossing(rising: Callable[[float], float], low: float, high: float) -> float:
    """Return where a rising function passes 0, by bisection."""
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if rising(middle) > 0:
            high = middle
        else:
            low = middle
    return (low + high) / 2
