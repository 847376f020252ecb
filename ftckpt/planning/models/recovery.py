"""Compute the share of wall time that a job runs, and the share that recovery takes."""

from __future__ import annotations

from typing import NamedTuple

from .arithmetic import Real, exp, expm1, require


class RecoveryShares(NamedTuple):
    """Shares of wall time; they add up to 1.

    Attributes:
        running: the job works or saves, whether or not that is kept.
        detection: a failure is being found out and what failed replaced.
        restart: the job reloads, retries included.
    """

    running: Real
    detection: Real
    restart: Real


def divide(mtbf: Real, restart: Real, detect: Real, *, safe: bool = False) -> RecoveryShares:
    """Divide wall time between failures into running and recovering, for exponential failures.

    After each failure come D seconds in which nothing fails, then R seconds that a failure may
    interrupt (D follows, and R from its beginning), then the job runs for M on average. A failure
    comes every M + D seconds, and a restart is finished before one with probability e^(-R/M).

    Args:
        mtbf: M, mean seconds between failures while the job runs or restarts, > 0, or infinite.
        restart: R, seconds, >= 0.
        detect: D, seconds, >= 0.
        safe: take it that nothing fails during R; then a failure comes every M + D + R.

    Raises:
        UsageError: an argument is out of range or not a number.
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
