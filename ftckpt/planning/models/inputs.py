"""Inputs of the tier and spot models and of the simulation.

The simulation shares these records with the closed forms, and no code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ftckpt.errors import UsageError

from .arithmetic import Real, require


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of one save and one failure, in seconds (see the package).

    Attributes:
        save: C; for an asynchronous save its snapshot.
        flush: F, from the end of `save`.

    Raises:
        UsageError: a value is out of range or not a number.
    """

    save: float
    restart: float = 0.0
    detect: float = 0.0
    flush: float = 0.0
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        require("the save cost", self.save, at_least=0)
        require("the restart time", self.restart, at_least=0)
        require("the detection time", self.detect, at_least=0)
        require("the flush", self.flush, at_least=0)
        require("the slowdown", self.slowdown, at_least=0, at_most=1, unit="")


@dataclass(frozen=True, slots=True)
class CopyTier:
    """One place that keeps copies: memory of a peer, local disk, shared storage.

    Attributes:
        name: as the user calls it.
        cost: seconds that a save into this tier adds to a save into the tiers below, >= 0.
        restart: seconds to restart from it, >= 0.
        covers: share of all failures that this tier or one below survives, in (0, 1].

    Raises:
        UsageError: a value is out of range or not a number.
    """

    name: str
    cost: float
    restart: float
    covers: float

    def __post_init__(self) -> None:
        require(f"the save cost of tier {self.name}", self.cost, at_least=0)
        require(f"the restart time of tier {self.name}", self.restart, at_least=0)
        require(f"the coverage of tier {self.name}", self.covers, above=0, at_most=1, unit="")


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which save goes where.

    Attributes:
        tiers: in use, from the cheapest; the last survives everything.
        interval: w, seconds of useful work between two saves of the first tier.
        counts: n_j: every n_j-th save into tier j also goes into tier j + 1; one number fewer than
            tiers.
    """

    tiers: tuple[CopyTier, ...]
    interval: Real
    counts: tuple[Real, ...]

    def gap(self, tier: int) -> Real:
        """Return the seconds of useful work between two saves into a tier; tiers count from 0."""
        return self.interval * math.prod(self.counts[:tier])


@dataclass(frozen=True, slots=True)
class Preemption:
    """Machines that are preempted with notice.

    Attributes:
        rate: preemptions of the job per second, >= 0.
        notice: seconds from the announcement to the end, >= 0.
        reliability: share of preemptions that are announced, in [0, 1].

    Raises:
        UsageError: a value is out of range or not a number.
    """

    rate: float
    notice: float
    reliability: float = 1.0

    def __post_init__(self) -> None:
        require("the preemption rate", self.rate, at_least=0, unit="per second")
        require("the notice", self.notice, at_least=0)
        require("the reliability of notice", self.reliability, at_least=0, at_most=1, unit="")


def shares(tiers: Sequence[CopyTier]) -> tuple[float, ...]:
    """Return for each tier the share of failures that it survives and no tier before it does.

    `tiers` go from the one that survives least to the one that survives everything.

    Raises:
        UsageError: there are none, they are out of order, or the last does not cover everything.
    """
    if not tiers:
        raise UsageError("no tier to save to is given")
    if not math.isclose(tiers[-1].covers, 1, abs_tol=1e-12):
        raise UsageError(
            f"no tier cures every failure: {tiers[-1].name} covers {tiers[-1].covers:g}",
            hint="let the last tier, the durable one, cover 1",
        )
    before = 0.0
    found = []
    for tier in tiers:
        if tier.covers < before:
            raise UsageError(
                f"tier {tier.name} covers {tier.covers:g}, less than the tier before it",
                hint="name tiers from the one that survives least to the one that survives most",
            )
        found.append(tier.covers - before)
        before = tier.covers
    return tuple(found)
