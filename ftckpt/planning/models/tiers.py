"""Saves into several tiers: cheap copies that survive little, expensive ones that survive all.

Tiers are numbered from 1, the cheapest. A failure is of class j if tier j is the first that
survives it; classes have rates l_j, l in all. Every save goes into tier 1, every n_1-th of those
also into tier 2, every n_2-th of those into tier 3, and so on.

To first order each tier follows Young with its own rate: its saves lie sqrt(2 C_j/l_j) apart, and
the overheads add up, H = sum of sqrt(2 l_j C_j) (Vaidya; Moody et al., SC 2010; Di, Robert, Vivien
and Cappello, 2017; Benoit et al., 2017). `outcome` is exact for exponential failures.

`tiers` go from the one that survives least to the one that survives everything; every function
raises UsageError if no tier covers everything.

The exact mean time of a nested pattern of saves, by elimination.

Let E_i be the mean time from the i-th save to the end of the pattern. In the bulk after it, of
length L, nothing fails with probability q = e^(-l L); else a failure of class j sends the job back
to the last save in the tier that the restart ends with:

    E_i = (1 - q)/l + q E_(i+1) + (1 - q) (V + sum over tiers m of h_m E_(last save in tier m))

V is the mean time of a recovery and h_m the chance that it ends from tier m: a restart from tier j
that is interrupted by a failure of class c continues from tier max(j, c).

A run of saves between two of tier m + 1 is a `_Block`: linear in the E after it and in the E of the
saves that it may fall back to. Blocks of one kind follow each other, so powers of blocks replace a
sum over all saves, and the cost does not depend on their number.

Copies in the memory of other machines: which losses they survive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

from ftckpt.errors import UsageError

from .arithmetic import Real, choose, exp, expm1, exposed, larger, log1p, peak, require, smaller
from .spot import CopyTier, Pattern, shares
from .young_daly import Outcome

# Chance below which a job never passes; its powers, one per tier, are still valid divisors.
_LEAST = 1e-60


class Times(NamedTuple):
    """Mean seconds of a pattern, by use."""

    running: Real
    detection: Real
    restart: Real

    def scaled(self, factor: Real) -> Times:
        """Return each of them times `factor`."""
        return Times(*(factor * x for x in self))

    def plus(self, other: Times) -> Times:
        """Return the sums."""
        return Times(*(x + y for x, y in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class _Block:
    """E at the start = times + back[m] E(last save in tier m) + onward E at the end.

    The weights add up to 1; each is stored, because a difference from 1 would lose the small ones.
    """

    times: Times
    back: tuple[Real, ...]
    onward: Real

    def then(self, after: _Block) -> _Block:
        """Return this block followed by another."""
        rest = self.onward
        return _Block(
            self.times.plus(after.times.scaled(rest)),
            tuple(a + rest * b for a, b in zip(self.back, after.back, strict=True)),
            rest * after.onward,
        )

    def repeated(self, count: Real) -> _Block:
        """Return `count` such blocks in a row; an empty one for 0."""
        leave = sum(self.back)
        # 1 + r + ... + r^(count - 1) with r = 1 - leave, which may be almost 1 or almost 0.
        some = choose(leave > 0, smaller(leave, 1 - 1e-16), 0.5)
        power = count * log1p(-some)
        total = choose(leave > 0, -expm1(power) / some, count)
        return _Block(
            self.times.scaled(total),
            tuple(total * b for b in self.back),
            choose(leave > 0, exp(power), 1.0),
        )

    def starting_save_of(self, tier: int) -> _Block:
        """Return the block with its start substituted for the last save in `tier`."""
        others = [0.0 if m == tier else b for m, b in enumerate(self.back)]
        left = larger(self.onward + sum(others), _LEAST)
        return _Block(
            self.times.scaled(1 / left), tuple(b / left for b in others), self.onward / left
        )


def cycle(
    tiers: Sequence[CopyTier],
    shares: Sequence[float],
    interval: Real,
    counts: Sequence[Real],
    rate: Real,
    detect: Real,
) -> Times:
    """Return the mean time from one save into the last tier to the next.

    Args:
        tiers: from the cheapest.
        shares: share of failures of each class; they add up to 1.
        interval: w, seconds of useful work before each save.
        counts: saves into each tier but the last per save into the next.
        rate: l, failures per second.
        detect: D, seconds after each failure.
    """
    recovery, landing = _recovery(tiers, shares, rate, detect)

    def block(tier: int, saved: int) -> _Block:
        """Return the block between two saves in `tier`, the last of which is also in `saved`."""
        if tier:
            inner = block(tier - 1, tier - 1).repeated(counts[tier - 1] - 1)
            whole = inner.then(block(tier - 1, saved))
        else:
            length = interval + sum(t.cost for t in tiers[: saved + 1])
            fails = -expm1(-rate * length)
            times = Times(exposed(rate, length), 0.0, 0.0).plus(recovery.scaled(fails))
            whole = _Block(times, tuple(fails * chance for chance in landing), exp(-rate * length))
        return whole.starting_save_of(tier)

    last = len(tiers) - 1
    return block(last, last).times


def _recovery(
    tiers: Sequence[CopyTier], shares: Sequence[float], rate: Real, detect: Real
) -> tuple[Times, list[Real]]:
    """Return the mean time from a failure to running again, and the chance of each tier."""
    spent: list[Times] = []
    ends: list[list[Real]] = []
    for number in reversed(range(len(tiers))):
        done = exp(-rate * tiers[number].restart)
        fails = -expm1(-rate * tiers[number].restart)
        times = Times(0.0, detect, exposed(rate, tiers[number].restart))
        chances: list[Real] = [0.0] * len(tiers)
        chances[number] = done
        for worse in range(number + 1, len(tiers)):
            ahead = len(tiers) - 1 - worse
            times = times.plus(spent[ahead].scaled(fails * shares[worse]))
            chances = [
                a + fails * shares[worse] * b for a, b in zip(chances, ends[ahead], strict=True)
            ]
        again = 1 / larger(done + fails * sum(shares[number + 1 :]), _LEAST)
        spent.append(times.scaled(again))
        ends.append([again * chance for chance in chances])
    spent.reverse()
    ends.reverse()
    mean = Times(0.0, 0.0, 0.0)
    landing: list[Real] = [0.0] * len(tiers)
    for share, times, chances in zip(shares, spent, ends, strict=True):
        mean = mean.plus(times.scaled(share))
        landing = [a + share * b for a, b in zip(landing, chances, strict=True)]
    return mean, landing


_MOST = 10_000  # saves into a tier between two into the next
_SWEEPS = 4  # each gap hardly depends on the others: three sweeps suffice
_MOST_CHANGES = 6  # of a count by one, after rounding: more would gain nothing visible


@dataclass(frozen=True, slots=True)
class FirstOrder:
    """The first-order model of a set of tiers.

    Attributes:
        gaps: seconds of useful work between two saves into each tier; infinite for a tier that
            survives nothing that the tier before it does not.
        overhead: H, losses per second of useful work without restarts.
    """

    gaps: tuple[float, ...]
    overhead: float


def first_order(tiers: Sequence[CopyTier], mtbf: float) -> FirstOrder:
    """Return Young's interval for each tier with its own rate, and the summed overhead.

    Good to 0.2 percentage points of goodput at an overhead of 7 %; the truth lies between 1 - H and
    1/(1 + H).
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

    Failures strike work, saves and restarts. An interrupted restart continues from the tier that
    survives both failures; after a restart from tier j the copies of the tiers before it are whole
    again. The interval and the counts (>= 1) may be arrays; `mtbf` is finite.
    """
    require("the interval", pattern.interval, above=0)
    require("the mean time between failures", mtbf, above=0)
    require("the detection time", detect, at_least=0)
    for count in pattern.counts:
        require("the number of saves between two of the next tier", count, at_least=1, unit="")
    times = cycle(pattern.tiers, shares(pattern.tiers), pattern.interval, pattern.counts,
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


def select(tiers: Sequence[CopyTier], mtbf: float) -> tuple[CopyTier, ...]:
    """Return the tiers worth saving to: the subset with the least first-order loss.

    A tier that is left out passes its failures on to the next. The loss of a subset is the sum of
    sqrt(2 l_j C_j) + l_j R_j. The first tier that covers everything always stays, and those after
    it never do.
    """

    def loss(kept: Sequence[CopyTier]) -> float:
        restarts = zip(kept, shares(kept), strict=True)
        return first_order(kept, mtbf).overhead + sum(t.restart * p / mtbf for t, p in restarts)

    shares(tiers)
    last = next(n for n, tier in enumerate(tiers) if tier.covers == max(t.covers for t in tiers))
    subsets = (
        (*some, tiers[last])
        for size in range(last + 1)
        for some in combinations(tiers[:last], size)
    )
    return min(subsets, key=loss)


def optimum(tiers: Sequence[CopyTier], mtbf: float, *, detect: float = 0.0) -> Pattern:
    """Return the pattern with the largest exact goodput, of the tiers worth saving to.

    Begins at the first-order gaps and improves one after the other, with real numbers of saves in
    between; these are rounded, and then changed by one while that gains anything visible. At most
    10,000 saves into one tier come between two into the next. The interval is known to about 1e-5.
    UsageError also if the last tier costs nothing, because no optimum exists then.
    """
    kept = select(tiers, mtbf)
    require(f"the save cost of tier {kept[-1].name}", kept[-1].cost, above=0)
    gaps = list(first_order(kept, mtbf).gaps)
    for place in reversed(range(len(gaps) - 1)):
        gaps[place] = min(max(gaps[place], gaps[place + 1] / _MOST), gaps[place + 1])

    def goodput(gaps: Sequence[Real]) -> Real:
        counts = tuple(larger(after / gap, 1.0) for gap, after in pairwise(gaps))
        return outcome(Pattern(kept, gaps[0], counts), mtbf, detect=detect).useful

    for _ in range(_SWEEPS):
        for place in range(len(gaps)):
            gaps[place] = _best_gap(goodput, gaps, place)
    counts = tuple(max(1, round(after / gap)) for gap, after in pairwise(gaps))
    return _best_counts(kept, counts, gaps[0], mtbf, detect)


def _best_gap(goodput: Callable[[Sequence[Real]], Real], gaps: list[float], place: int) -> float:
    """Return the best gap of one tier, between those of its neighbours."""
    low = max(gaps[place] / 4, gaps[place - 1] if place else 0.0)
    high = gaps[place] * 4
    if place + 1 < len(gaps):
        low, high = max(low, gaps[place + 1] / _MOST), min(high, gaps[place + 1])
    middle, factor = math.sqrt(low * high), math.sqrt(high / low)
    return float(
        peak(lambda gap: goodput([*gaps[:place], gap, *gaps[place + 1 :]]), middle, factor, 26)
    )


def _best_counts(
    kept: tuple[CopyTier, ...], counts: tuple[int, ...], interval: float, mtbf: float, detect: float
) -> Pattern:
    """Return a pattern that no change of one count by one improves."""

    def best(counts: tuple[int, ...], guess: float) -> tuple[float, Pattern]:
        def goodput(interval: Real) -> Real:
            return outcome(Pattern(kept, interval, counts), mtbf, detect=detect).useful

        interval = float(peak(goodput, guess, 2.0, 24))
        return float(goodput(interval)), Pattern(kept, interval, counts)

    found = best(counts, interval)
    for _ in range(_MOST_CHANGES):
        counts = tuple(int(count) for count in found[1].counts)
        changed = (
            (*counts[:place], counts[place] + way, *counts[place + 1 :])
            for place in range(len(counts))
            for way in (1, -1)
            if 1 <= counts[place] + way <= _MOST
        )
        better = max(
            (best(c, float(found[1].interval)) for c in changed), default=found, key=_value
        )
        if better[0] <= found[0] * (1 + 1e-10):
            break
        found = better
    return found[1]


def _value(found: tuple[float, Pattern]) -> float:
    return found[0]


def survival(machines: int, copies: int, lost: int) -> float:
    """Return the probability that no group lost every copy, when machines are lost together.

    Machines form groups of `copies` m (1: no copy elsewhere), each member holding the others'
    copies. By inclusion and exclusion over the N/m groups, sum over j of (-1)^j C(N/m, j) C(N - j
    m, k - j m) / C(N, k), in whole numbers. For 128 machines in pairs: 0.992 for 2 lost at once,
    0.793 for 8. N = `machines` is a multiple of m; k = `lost` is in [0, N], each set equally
    likely.
    """
    if machines < 1 or copies < 1 or machines % copies:
        raise UsageError(f"{machines} machines cannot form groups of {copies}")
    if not 0 <= lost <= machines:
        raise UsageError(f"{lost} of {machines} machines cannot be lost")
    ways = sum(
        (-1) ** j
        * math.comb(machines // copies, j)
        * math.comb(machines - j * copies, lost - j * copies)
        for j in range(lost // copies + 1)
    )
    return float(ways / math.comb(machines, lost))
