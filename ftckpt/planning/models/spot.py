"""Machines that may be preempted, with notice.

A preemption announced early enough triggers a save of its own: the current save is abandoned, a
fresh snapshot is taken and flushed (E = s + F with training stopped), and then D and R follow as
after any failure. Nothing is lost, so announced preemptions do not shorten the interval. With
notice shorter than E, or none, a preemption is a failure like any other.

To first order tau = sqrt(2 C/u), with u the rate of all unannounced interruptions. Exactly, with
exponential times (rates u and a, l = u + a) and counted from one interruption to the next,

    goodput = [u K + a (e^(-uE) B + (1 - e^(-uE)) K)] / [1 + a X + l Y]

K: work that is durable at an interruption; B: all work done by then; X: seconds of an emergency
save, or until a failure cuts it short; Y: seconds until the job runs again.

Inputs of the tier and spot models and of the simulation.

The simulation shares these records with the closed forms, and no code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ftckpt.errors import UsageError

from . import asynchronous
from .arithmetic import Real, choose, exp, expm1, exposed, larger, peak, require, smaller
from .young_daly import Outcome


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


class Interruptions(NamedTuple):
    """Interruptions per second: unannounced, and announced early enough to save."""

    unannounced: Real
    announced: Real


def classify(failure_rate: Real, preemption: Preemption, emergency: Real) -> Interruptions:
    """Split failures and preemptions by whether there is time for a save.

    `failure_rate` is per second, >= 0; `emergency` is E, seconds until a save begun at the notice
    is durable, >= 0.
    """
    require("the failure rate", failure_rate, at_least=0, unit="per second")
    require("the emergency save", emergency, at_least=0)
    enough = choose(emergency <= preemption.notice, preemption.reliability, 0.0)
    announced = enough * preemption.rate
    return Interruptions(failure_rate + preemption.rate - announced, announced)


def outcome(
    interval: Real,
    snapshot: Real,
    unannounced: Real,
    announced: Real,
    *,
    flush: Real = 0.0,
    slowdown: Real = 0.0,
    restart: Real = 0.0,
    detect: Real = 0.0,
) -> Outcome:
    """Return where the wall time goes when a save answers each announced preemption.

    Without any it is `asynchronous.outcome`, and with flush = slowdown = 0 `young_daly.outcome`. A
    preemption during an emergency save is part of the announced one. `unannounced` (u) and
    `announced` (a) are interruptions per second, >= 0.
    """
    require("the rate of unannounced interruptions", unannounced, at_least=0, unit="per second")
    require("the rate of announced interruptions", announced, at_least=0, unit="per second")
    rate = unannounced + announced
    # Validates the rest, and gives the work durable at an interruption, per second of running.
    steady = asynchronous.outcome(
        interval, snapshot, choose(rate > 0, 1 / choose(rate > 0, rate, 1.0), float("inf")),
        flush=flush, slowdown=slowdown,
    )  # fmt: skip
    done, waited = _progress(interval, snapshot, rate, flush, slowdown)
    emergency = snapshot + flush
    survives = exp(-unannounced * emergency)
    told = announced / choose(rate > 0, rate, 1.0)
    rescued, rolled = told * survives, 1 - told * survives
    idle = exp(
        -restart * rate
    )  # chance that a restart finishes; the times below are multiplied by it
    running = 1 + announced * exposed(unannounced, emergency)
    whole = running * idle + detect * rate - expm1(-restart * rate)
    share = idle / whole
    useful = share * (rolled * steady.useful + rescued * done)
    waiting = share * (rolled * steady.waiting + rescued * waited)
    stalled = rescued * (1 - done - waited) + announced * survives * emergency
    save = share * (rolled * steady.save + stalled)
    return Outcome(
        model="exact, exponential failures and announced preemptions",
        interval=interval,
        useful=useful,
        save=save,
        lost=share * running - useful - save - waiting,
        detection=detect * rate / whole,
        restart=-expm1(-restart * rate) / whole,
        waiting=waiting,
    )


def optimum(
    snapshot: Real,
    unannounced: Real,
    announced: Real,
    *,
    flush: Real = 0.0,
    slowdown: Real = 0.0,
    restart: Real = 0.0,
    detect: Real = 0.0,
) -> Real:
    """Return the useful work between two saves, in seconds, with the largest exact goodput.

    Searched from a thirtieth to thirty times `asynchronous.optimum` for the unannounced alone, to
    about 1e-7: if announced preemptions come more often than saves would, the interval grows and
    hardly matters. The snapshot or the flush, and the unannounced rate, must be above 0.
    """
    require("the rate of unannounced interruptions", unannounced, above=0, unit="per second")
    floor = asynchronous.least_interval(flush, slowdown)
    guess = asynchronous.optimum(snapshot, 1 / unannounced, flush=flush, slowdown=slowdown)
    require("the optimum without preemptions", guess, above=0)

    def goodput(interval: Real) -> Real:
        return outcome(
            interval, snapshot, unannounced, announced,
            flush=flush, slowdown=slowdown, restart=restart, detect=detect,
        ).useful  # fmt: skip

    return larger(peak(goodput, guess, 30.0), floor)


def _progress(
    interval: Real, snapshot: Real, rate: Real, flush: Real, slowdown: Real
) -> tuple[Real, Real]:
    """Return the shares of running time until an interruption that were work, and waiting.

    The integral of work speed, and of waiting, over the chance of no interruption yet: one first
    bulk without a flush behind it, then periods of slowed work, work, wait and snapshot.
    """
    slowed, waits = asynchronous.stall(interval, flush, slowdown)
    busy = interval + slowed
    behind = smaller(flush, busy)  # how long the work runs beside the flush
    period = (1 - slowdown) * exposed(rate, behind) + exp(-rate * behind) * exposed(
        rate, busy - behind
    )
    periods = exp(-rate * (interval + snapshot)) / exposed(rate, busy + waits + snapshot)
    done = rate * exposed(rate, interval) + periods * period
    return done, periods * exp(-rate * busy) * exposed(rate, waits)
