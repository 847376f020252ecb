"""The exact mean time of a nested pattern of saves, by elimination.

Let E_i be the mean time from the i-th save to the end of the pattern. In the bulk after it, of
length L, nothing fails with probability q = e^(-l L); else a failure of class j sends the job back
to the last save in the tier that the restart ends with:

    E_i = (1 - q)/l + q E_(i+1) + (1 - q) (V + sum over tiers m of h_m E_(last save in tier m))

V is the mean time of a recovery and h_m the chance that it ends from tier m: a restart from tier j
that is interrupted by a failure of class c continues from tier max(j, c).

A run of saves between two of tier m + 1 is a `_Block`: linear in the E after it and in the E of the
saves that it may fall back to. Blocks of one kind follow each other, so powers of blocks replace a
sum over all saves, and the cost does not depend on their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .arithmetic import Real, choose, exp, expm1, exposed, larger, log1p, smaller
from .inputs import CopyTier

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
