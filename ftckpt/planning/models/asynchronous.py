"""Saves that block only for a snapshot and are flushed in the background.

Training pauses for the snapshot s; then the flush F runs while training continues at (1 - a) of its
speed. The copy counts once its flush is done: a failure costs the work since the newest *durable*
copy, F more than with a blocking save. There is one staging buffer, so a snapshot waits until the
flush before it is done (back-pressure).

Derived from renewals at failures and checked by simulation: saves become durable tau + s + F after
the restart and every P = max(tau + a F, F) + s from then on, so

    goodput = tau e^(-(tau + s + F)/M) / ((1 - e^(-P/M)) (M + D) e^(R/M))

which for F = a = 0 is `young_daly.outcome`. Without waiting it is largest at `young_daly.optimum`
with C = s + a F: F multiplies goodput by e^(-F/M) and does not move the optimum, but saves cannot
come more often than flushes finish. The first-order interval with an overlapping save is due to
Herault and Robert.
"""

from __future__ import annotations

from . import young_daly
from .arithmetic import Real, choose, exp, exposed, larger, require, smaller
from .young_daly import Outcome, divide


def least_interval(flush: Real, slowdown: Real = 0.0) -> Real:
    """Return the work done during one flush, (1 - a) F; more frequent saves wait."""
    _require(0.0, flush, slowdown)
    return (1 - slowdown) * flush


def optimum(snapshot: Real, mtbf: Real, *, flush: Real = 0.0, slowdown: Real = 0.0) -> Real:
    """Return the useful work between two saves with the largest goodput.

    The larger of `young_daly.optimum` for a cost of s + a F and `least_interval`; in the latter
    case the flush sets the pace, not the failure rate.
    """
    _require(snapshot, flush, slowdown)
    return larger(
        young_daly.optimum(snapshot + slowdown * flush, mtbf), least_interval(flush, slowdown)
    )


def outcome(
    interval: Real,
    snapshot: Real,
    mtbf: Real,
    *,
    flush: Real = 0.0,
    slowdown: Real = 0.0,
    restart: Real = 0.0,
    detect: Real = 0.0,
) -> Outcome:
    """Return where the wall time goes with a save after every `interval` of work.

    An interval below `least_interval` includes its waiting. Time lost to the slowdown counts as
    `save`.
    """
    require("the interval", interval, above=0)
    _require(snapshot, flush, slowdown)
    recovery = divide(mtbf, restart, detect)
    rate = 1 / mtbf
    slowed, waited = stall(interval, flush, slowdown)
    # Between failures, per second of running: chance of a durable copy, and number of copies.
    first = exp(-(interval + snapshot + flush) * rate)
    copies = recovery.running * first / exposed(rate, interval + slowed + waited + snapshot)
    later = copies - recovery.running * rate * first  # all but the first wait for a flush
    useful, save, waiting = copies * interval, copies * snapshot + later * slowed, later * waited
    return Outcome(
        model="exact, exponential failures, asynchronous saves",
        interval=interval,
        useful=useful,
        save=save,
        lost=recovery.running - useful - save - waiting,
        detection=recovery.detection,
        restart=recovery.restart,
        waiting=waiting,
    )


def first_order(
    interval: Real,
    snapshot: Real,
    mtbf: Real,
    *,
    flush: Real = 0.0,
    slowdown: Real = 0.0,
    restart: Real = 0.0,
    detect: Real = 0.0,
) -> Outcome:
    """Return the first-order sum (s + a F)/P + (P/2 + F + D + R)/M, with P = tau + s + a F.

    Good to 0.1 percentage points if P + F is 2 % of M, off by 3 if it is a third. The interval must
    leave room for the flush.
    """
    _require(snapshot, flush, slowdown)
    require("the mean time between failures", mtbf, above=0)
    require("the interval minus the work during a flush", interval - (1 - slowdown) * flush,
            at_least=0)  # fmt: skip
    stopped = snapshot + slowdown * flush
    period = interval + stopped
    saving, lost = stopped / period, (period / 2 + flush) / mtbf
    detection, restarting = detect / mtbf, restart / mtbf
    return Outcome(
        model="first order, asynchronous saves",
        interval=interval,
        useful=1 - saving - lost - detection - restarting,
        save=saving,
        lost=lost,
        detection=detection,
        restart=restarting,
    )


def stall(interval: Real, flush: Real, slowdown: Real) -> tuple[Real, Real]:
    """Return how long the previous flush slows a period down, and how long the period waits for it.

    Both in seconds: min(a F, tau a/(1 - a)), and the rest of F after the work.
    """
    overtaken = interval < (1 - slowdown) * flush  # the work is done before the flush
    speed = choose(overtaken, 1 - slowdown, 1.0)
    slowed = choose(overtaken, interval * slowdown / speed, slowdown * flush)
    return slowed, larger(0.0, smaller(flush - interval - slowed, flush))


def _require(snapshot: Real, flush: Real, slowdown: Real) -> None:
    require("the snapshot", snapshot, at_least=0)
    require("the flush", flush, at_least=0)
    require("the slowdown", slowdown, at_least=0, at_most=1, unit="")
