"""Saves into several tiers: cheap copies that survive little, dear ones that survive everything.

Tiers are numbered from 1, the cheapest. A failure is of class j when tier j is the first that cures
it; classes come with rates l_j, l in all. Every save goes into tier 1, every n_1-th of those into
tier 2 as well, every n_2-th of those into tier 3, and so on.

To first order each tier follows Young with its own rate: its saves lie sqrt(2 C_j/l_j) apart, and
the overheads add up, H = sum of sqrt(2 l_j C_j) (Vaidya; Moody et al., SC 2010; Di, Robert, Vivien
and Cappello, 2017; Benoit et al., 2017). `outcome` is exact for exponential failures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from . import chain
from .arithmetic import Real, require
from .inputs import Pattern, Tier, shares
from .outcome import Outcome
from .search import peak


@dataclass(frozen=True, slots=True)
class FirstOrder:
    """What the first-order model says for a set of tiers.

    Attributes:
        gaps: seconds of useful work between two saves into each tier; infinite for a tier that
            cures nothing that the tier before it does not.
        overhead: H, losses per second of useful work without restarts.
    """

    gaps: tuple[float, ...]
    overhead: float


def first_order(tiers: Sequence[Tier], mtbf: float) -> FirstOrder:
    """Return Young's interval for each tier with its own rate, and the summed overhead.

    Good to 0.2 percentage points of goodput at an overhead of 7 %; the truth lies between 1 - H and
    1/(1 + H).

    Args:
        tiers: from the one that survives least to the one that survives everything.
        mtbf: M, mean seconds between failures of any class, > 0.

    Raises:
        UsageError: an argument is out of range or not a number, or no tier covers everything.
    """
    require("the mean time between failures", mtbf, above=0)
    rates = [share / mtbf for share in shares(tiers)]
    pairs = list(zip(tiers, rates, strict=True))
    return FirstOrder(
        gaps=tuple(math.sqrt(2 * t.cost / rate) if rate else math.inf for t, rate in pairs),
        overhead=sum(math.sqrt(2 * t.cost * rate) for t, rate in pairs),
    )


def outcome(pattern: Pattern, mtbf: Real, *, detect: Real = 0.0) -> Outcome:
    """Return where the wall time goes under a pattern: exact for exponential failures.

    Failures strike work, saves and restarts. A restart that is interrupted goes on from the tier
    that cures both failures; after a restart from tier j the copies of the tiers before it are
    whole again. The interval and the counts may be arrays.

    Args:
        pattern: the tiers and how often each is saved to; counts >= 1.
        mtbf: M, mean seconds between failures of any class, > 0; finite.
        detect: D, seconds after each failure, >= 0; failure-free.

    Raises:
        UsageError: an argument is out of range or not a number, or no tier covers everything.
    """
    require("the interval", pattern.interval, above=0)
    require("the mean time between failures", mtbf, above=0)
    require("the detection time", detect, at_least=0)
    for count in pattern.counts:
        require("the number of saves between two of the next tier", count, at_least=1, unit="")
    times = chain.cycle(pattern.tiers, shares(pattern.tiers), pattern.interval, pattern.counts,
                        1 / mtbf, detect)  # fmt: skip
    whole = times.running + times.detection + times.restart
    useful: Real = pattern.interval * math.prod(pattern.counts)
    save: Real = 0.0
    for number, tier in enumerate(pattern.tiers):
        save = save + tier.cost * math.prod(pattern.counts[number:])
    return Outcome(
        model="exact, exponential failures, tiers",
        interval=pattern.interval,
        useful=useful / whole,
        save=save / whole,
        lost=(times.running - useful - save) / whole,
        detection=times.detection / whole,
        restart=times.restart / whole,
    )


def select(tiers: Sequence[Tier], mtbf: float) -> tuple[Tier, ...]:
    """Return the tiers worth saving to: the subset with the least first-order loss.

    A tier that is left out passes its failures on to the next. The loss of a subset is the sum of
    sqrt(2 l_j C_j) + l_j R_j; the last tier always stays. Arguments and errors as for
    `first_order`.
    """

    def loss(kept: Sequence[Tier]) -> float:
        restarts = zip(kept, shares(kept), strict=True)
        return first_order(kept, mtbf).overhead + sum(t.restart * p / mtbf for t, p in restarts)

    shares(tiers)
    subsets = (
        (*some, tiers[-1]) for size in range(len(tiers)) for some in combinations(tiers[:-1], size)
    )
    return min(subsets, key=loss)


def optimum(tiers: Sequence[Tier], mtbf: float, *, detect: float = 0.0) -> Pattern:
    """Return the pattern with the largest exact goodput, of the tiers worth saving to.

    Begins at the first-order pattern; the interval is sought to about 1e-5, the counts by steps up
    and down until none of them gains.

    Args:
        tiers: from the one that survives least to the one that survives everything.
        mtbf: M, mean seconds between failures of any class, > 0.
        detect: D, seconds after each failure, >= 0.

    Raises:
        UsageError: an argument is out of range or not a number, no tier covers everything, or the
            last tier costs nothing, so that there is no optimum.
    """
    kept = select(tiers, mtbf)
    require(f"the save cost of tier {kept[-1].name}", kept[-1].cost, above=0)
    gaps = first_order(kept, mtbf).gaps
    # A tier that cures nothing more is saved to as seldom as the next; a free one all the time.
    gaps = tuple(min(gap, gaps[-1]) for gap in gaps)
    counts = tuple(
        max(1, round(min(after / max(gap, after * 1e-4), 1e4))) for gap, after in pairwise(gaps)
    )

    def best(counts: tuple[int, ...]) -> tuple[float, Pattern]:
        def goodput(interval: Real) -> Real:
            return outcome(Pattern(kept, interval, counts), mtbf, detect=detect).useful

        interval = peak(goodput, gaps[-1] / math.prod(counts), 4.0, steps=26)
        return float(goodput(interval)), Pattern(kept, interval, counts)

    found = best(counts)
    step = max([1, *(count // 4 for count in counts)])
    while step:
        moved = True
        while moved:
            moved = False
            for place in range(len(counts)):
                for way in (step, -step):
                    count = max(1, counts[place] + way)
                    tried = (*counts[:place], count, *counts[place + 1 :])
                    candidate = best(tried)
                    if candidate[0] > found[0] * (1 + 1e-12):
                        found, counts, moved = candidate, tried, True
        step //= 2
    return found[1]
