"""Compute the share of wall time that a job runs, and the share that recovery takes."""

from __future__ import annotations

from typing import NamedTuple

from .arithmetic import Real, exp, expm1, require


class RecoveryShares(NamedTuple):
    """Shares of wall time; they add up to 1.

    Attributes:
        running: the job works or saves, whether or not that is kept.
        detection: a failure is noticed and the failed part replaced.
        restart: the job reloads, retries included.
    """

    running: Real
    detection: Real
    restart: Real


def divide(mtbf: Real, restart: Real, detect: Real, *, safe: bool = False) -> RecoveryShares:
    """Divide wall time between failures into running and recovering, for exponential failures.

    After each failure come D seconds in which nothing fails, then R seconds that a failure may
    interrupt (then D and R start again), then the job runs for M on average. A failure comes every
    M + D seconds, and a restart finishes before one with probability e^(-R/M). With `safe` nothing
    fails during R, and a failure comes every M + D + R.
    """
    require("the mean time between failures", mtbf, above=0, finite=False)
    require("the restart time", restart, at_least=0)
    require("the detection time", detect, at_least=0)
    rate = 1 / mtbf
    if safe:
        whole = 1 + (detect + restart) * rate
        return RecoveryShares(1 / whole, detect * rate / whole, restart * rate / whole)
    whole = 1 + detect * rate
    return RecoveryShares(
        running=exp(-restart * rate) / whole,
        detection=detect * rate / whole,
        restart=-expm1(-restart * rate) / whole,
    )
