"""Saves of the weights alone between two full saves: what they are worth to a restart.

A restart from weights alone is not exact: optimizer moments, scheduler, random state and the
position in the data are gone. Where it is accepted, the moments must be built up again, which costs
T of work (Adam's second moment averages over 1 / (1 - beta2) steps, 1,000 for 0.999: Kingma and Ba,
ICLR 2015), and the data may be seen twice.

With n - 1 of them at equal distances in a period P between full saves, a failure goes back to the
newest of them, the k-th, where that loses less: where k P/n > T. Then the T of work is done first,
and a failure in it goes back to the same one. Let K be the least such k, and d_k the work between
the k-th and the next with the pause behind it: P/n + c, the last P/n + C. With exponential failures
of mean time M a period takes

    M (e^(K (P/n + c) / M) - 1 + e^(T/M) * sum over k = K .. n - 1 of (e^(d_k/M) - 1))

of the time in which the job runs (own derivation: the memoryless segments are a chain, of which the
first K go back to its beginning, and each later one to its own, T longer). Without restarts from
weights it takes M (e^((P + (n-1) c + C)/M) - 1), so the gain is the goodput times their quotient,
less the goodput; restart and detection drop out. To first order in P/M it is

    G/M = 1/(n M) * sum over k = 1 .. n - 1 of max(0, k P/n - T)

which does not give the sign of a worth, the small difference of gain and cost. Of saves in the
background and of errors that are noticed late the formula is an estimate: it knows pauses alone.

The saves themselves are pauses inside the period: a job with them is one whose period is longer by
(n - 1) c, of which P is useful work. So their cost is exact, as far as the model of the job is.
They are worth nothing to a restart where T is P (n - 1)/n or more: then every failure goes back to
the full save. What remains is their use as milestones for evaluation and for serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, expm1

from .arithmetic import require
from .young_daly import Outcome

_LONGEST = 600.0


@dataclass(frozen=True, slots=True)
class WeightsOnly:
    """What weights-only saves cost and bring, as shares of wall time.

    Attributes:
        between: number of them between two full saves.
        save_s: pause for one.
        rewarm_s: work that a restart from one loses besides; None: such a restart is not accepted.
        cost: of making them: goodput without them, less goodput with them.
        gain: of restarts from them.
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
    *,
    full: float,
) -> WeightsOnly:
    """Return what `between` weights-only saves in each period between full saves are worth.

    Args:
        period: P, seconds of work between two full saves, > 0.
        mtbf: M, > 0.
        between: n - 1, >= 1.
        save: c, seconds of pause for one, >= 0.
        rewarm: T, seconds of work, >= 0; None: a restart from weights is not accepted.
        outcome: of a period without them, by its length.
        full: C, seconds of pause for a full save, >= 0.

    Raises:
        UsageError: a number is out of range.
    """
    require("the period", period, above=0)
    require("the mean time between failures", mtbf, above=0)
    require("the number of weights-only saves", between, at_least=1, unit="")
    require("the cost of a weights-only save", save, at_least=0)
    require("the cost of a full save", full, at_least=0)
    without, with_ = (with_pauses(outcome, period, w) for w in (0.0, between * save))
    gain = 0.0
    if rewarm is not None:
        require("the work to warm up again", rewarm, at_least=0)
        pauses = [save] * between + [full]
        gain = float(with_.useful) * _gained(period / len(pauses), pauses, rewarm, mtbf)
    cost = float(without.useful) - float(with_.useful)
    return WeightsOnly(between, save, rewarm, cost, gain, period * between / (between + 1))


def _gained(gap: float, pauses: Sequence[float], rewarm: float, mtbf: float) -> float:
    """Return how much more is done in the same time if a failure may go back to weights alone.

    Args:
        gap: P/n, seconds of work in front of each pause.
        pauses: c, n - 1 times, and C.
        rewarm: T.
        mtbf: M.
    """
    lengths = [(gap + pause) / mtbf for pause in pauses]
    first = next((k for k in range(1, len(lengths)) if k * gap > rewarm), 0)
    # A period that long never ends without a failure: e^x has no double any more, and its share of
    # useful work is none.
    if not first or sum(lengths) + rewarm / mtbf > _LONGEST:
        return 0.0
    again = exp(rewarm / mtbf) * sum(map(expm1, lengths[first:]))
    return expm1(sum(lengths)) / (expm1(sum(lengths[:first])) + again) - 1
