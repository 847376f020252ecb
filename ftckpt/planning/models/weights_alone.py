"""Saves of the weights alone between two full saves: what they are worth to a restart.

A restart from weights alone is not exact: optimizer moments, scheduler, random state and the
position in the data are gone. Where it is accepted, the moments must be built up again, which costs
T of work (Adam's second moment averages over 1 / (1 - beta2) steps, 1,000 for 0.999: Kingma and Ba,
ICLR 2015), and the data may be seen twice.

With n - 1 of them at equal distances in a period P between full saves, a failure that comes x
after the full one loses min(x, x mod (P/n) + T) instead of x. For x uniform in the period the mean
gain is

    G = 1/n * sum over k = 1 .. n - 1 of max(0, k P/n - T)

or G / M of the wall time, to first order in P/M, as Young's formula is (own derivation). The saves
themselves are pauses inside the period: a job with them is one whose period is longer by (n - 1) c,
of which P is useful work. So their cost is exact, as far as the model of the job is. They are worth
nothing to a restart
where T is P (n - 1)/n or more: then every failure goes back to the full save. What remains is their
use as milestones for evaluation and for serving.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .arithmetic import require
from .outcome import Outcome


@dataclass(frozen=True, slots=True)
class WeightsOnly:
    """What weights-only saves cost and bring, as shares of wall time.

    Attributes:
        between: number of them between two full saves.
        save_s: pause for one.
        rewarm_s: work that a restart from one loses besides; None: such a restart is not accepted.
        cost: of making them: goodput without them, less goodput with them.
        gain: of restarts from them, to first order.
        most_rewarm_s: a `rewarm_s` above which no restart gains by them.
    """

    between: int
    save_s: float
    rewarm_s: float | None
    cost: float
    gain: float
    most_rewarm_s: float

    @property
    def worth(self) -> float:
        """Gain less cost."""
        return self.gain - self.cost


def with_pauses(outcome: Callable[[float], Outcome], period: float, pauses: float) -> Outcome:
    """Return the outcome of a period of work that is interrupted by pauses.

    Args:
        outcome: of a period without pauses, by its length in seconds.
        period: P, seconds of useful work between two full saves, > 0.
        pauses: seconds of it all together, >= 0.
    """
    found = outcome(period + pauses)
    if not pauses:
        return found
    share = pauses / (period + pauses)
    paused = found.useful * share
    return replace(found, interval=period, useful=found.useful - paused, save=found.save + paused)


def weights_only(
    period: float,
    mtbf: float,
    between: int,
    save: float,
    rewarm: float | None,
    outcome: Callable[[float], Outcome],
) -> WeightsOnly:
    """Return what `between` weights-only saves in each period between full saves are worth.

    Args:
        period: P, seconds of work between two full saves, > 0.
        mtbf: M, > 0.
        between: n - 1, >= 1.
        save: c, seconds of pause for one, >= 0.
        rewarm: T, seconds of work, >= 0; None: a restart from weights is not accepted.
        outcome: of a period without them, by its length.

    Raises:
        UsageError: a number is out of range.
    """
    require("the period", period, above=0)
    require("the mean time between failures", mtbf, above=0)
    require("the number of weights-only saves", between, at_least=1, unit="")
    require("the cost of a weights-only save", save, at_least=0)
    gain = 0.0
    if rewarm is not None:
        require("the work to warm up again", rewarm, at_least=0)
        gap = period / (between + 1)
        gains = (max(0.0, k * gap - rewarm) for k in range(1, between + 1))
        gain = sum(gains) / (between + 1) / mtbf
    without, with_ = (with_pauses(outcome, period, w) for w in (0.0, between * save))
    cost = float(without.useful) - float(with_.useful)
    return WeightsOnly(between, save, rewarm, cost, gain, period * between / (between + 1))
