"""The textbook rules, for comparison: Young, Daly, and the effective training time ratio.

They are first order in C/M: their intervals are good, their predictions of waste are not. At C/M =
0.1 Young's interval is 17 % too long and costs 0.3 percentage points of goodput, while the
first-order waste is 44.7 % instead of 38.3 %. Take at most the interval from here, and its outcome
from `exact`.

Three conventions of waste are in use; "when does waste pass 20 % with C = 90 s?" has the answers
75.0, 68.0 (`per_period`) and, exactly, 64.8 minutes between failures.

The outcome of a saving interval: where the wall time goes.

Compute the share of wall time that a job runs, and the share that recovery takes.

Exponential failures and blocking saves, without approximation: the default model.

Failures are a Poisson process with mean time `mtbf` between them. They strike during work, saving
and recovery alike (not during detection and replacement). Valid for every cost and every interval.
A bulk of work `tau` and its save `C` take

    E = (M + D) e^(R/M) (e^((tau + C)/M) - 1)

of wall time on average (Bougeret, Casanova, Rabie, Robert, Vivien, SC 2011); goodput is tau / E. It
is largest where (1 - tau/M) e^((tau + C)/M) = 1, that is at

    tau* = M (1 + W0(-e^(-(1 + C/M))))

with Lambert's W, for any R and D. Without R and D the least waste is tau* / M. With a recovery that
cannot fail, E = (M + D + R) (e^((tau + C)/M) - 1) and the optimum is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from .arithmetic import Real, choose, exp, expm1, exposed, require, smaller, sqrt


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shares of wall time with a save after every `interval` seconds of useful work.

    The six shares add up to 1 in an exact model and in a simulation. A first-order model adds up
    its losses as if they could not coincide, so its `useful` may be negative: it shows the formula,
    not reality.

    Attributes:
        model: the model, and its convention of waste.
        interval: seconds of useful work between two saves, without the save itself.
        useful: goodput: work that was never thrown away.
        save: training paused, or was slowed, for saves that were kept.
        lost: work and saves thrown away because a failure came before they were durable.
        detection: noticing failures and replacing the failed parts.
        restart: reloading, retries included.
        waiting: training paused because an earlier save was still being flushed.
    """

    model: str
    interval: Real
    useful: Real
    save: Real
    lost: Real
    detection: Real
    restart: Real
    waiting: Real = 0.0

    @property
    def waste(self) -> Real:
        """The share of wall time that is not useful work."""
        return 1 - self.useful


def young(save: Real, mtbf: Real) -> Real:
    """Return Young's interval sqrt(2 C M), in seconds of work between two saves.

    From J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9),
    1974. Within 5 % of the optimum for C/M < 0.01; always too long.
    """
    _require(save, mtbf)
    return _geometric(save, mtbf)


def daly(save: Real, mtbf: Real) -> Real:
    """Return Daly's higher-order interval, in seconds of work between two saves.

    sqrt(2 C M) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C for C < 2M, else M; J. T. Daly, "A higher order
    estimate of the optimum checkpoint interval for restart dumps", FGCS 22, 2006. Off by -0.001 %
    at C/M = 0.01, -0.04 % at 0.1, -1.8 % at 1, and +5.5 % where it switches to M.
    """
    _require(save, mtbf)
    x = smaller(save / (2 * mtbf), 1.0)
    series = _geometric(save, mtbf) * (1 + sqrt(x) / 3 + x / 9) - save
    return choose(x < 1, series, mtbf)


def first_order(
    interval: Real, save: Real, mtbf: Real, *, restart: Real = 0.0, detect: Real = 0.0
) -> Outcome:
    """Return Young's first-order sum of losses, in units of useful work.

    waste = C/tau + tau/2M + (D + R)/M. Assumes C, R, D and tau far below M and at most one failure
    per interval; good to 0.7 percentage points for C/M < 0.01, and above 100 % for C > M/2.
    """
    _require(save, mtbf, interval, restart, detect)
    saving, lost = save / interval, interval / (2 * mtbf)
    detection, restarting = detect / mtbf, restart / mtbf
    return Outcome(
        model="first order, losses per second of work",
        interval=interval,
        useful=1 - saving - lost - detection - restarting,
        save=saving,
        lost=lost,
        detection=detection,
        restart=restarting,
    )


def per_period(interval: Real, save: Real, mtbf: Real) -> Real:
    """Return C/(tau + C) + tau/2M: first-order waste with the save's share of wall time."""
    _require(save, mtbf, interval)
    return save / (interval + save) + interval / (2 * mtbf)


def ettr(interval: Real, save: Real, mtbf: Real, *, restart: Real = 0.0) -> Outcome:
    """Return the expected effective training time ratio, as Meta defines it for its clusters.

    (1 - (u0 + dt/2)/M) / (1 + w/dt) with dt the interval, u0 the restart and w the save; queueing
    is left out (Kokolis et al., "Revisiting reliability in large-scale machine learning research
    clusters", 2024). Of mixed order: within about 1 percentage point of the exact goodput (0.789
    against 0.798 for dt = 30 min, w = 1 min, u0 = 5 min).
    """
    _require(save, mtbf, interval, restart)
    working = 1 / (1 + save / interval)
    lost, restarting = working * interval / (2 * mtbf), working * restart / mtbf
    return Outcome(
        model="effective training time ratio",
        interval=interval,
        useful=working - lost - restarting,
        save=1 - working,
        lost=lost,
        detection=0.0 * working,
        restart=restarting,
    )


def _geometric(save: Real, mtbf: Real) -> Real:
    """Return sqrt(2 C M), even if the product overflows."""
    return sqrt(2 * save) * sqrt(mtbf)


def _require(
    save: Real, mtbf: Real, interval: Real = 1.0, restart: Real = 0.0, detect: Real = 0.0
) -> None:
    require("the save cost", save, at_least=0)
    require("the mean time between failures", mtbf, above=0)
    require("the interval", interval, above=0)
    require("the restart time", restart, at_least=0)
    require("the detection time", detect, at_least=0)


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


# x - x^2/3 + ...: the root of -log(1-x) - x = q^2/2 in powers of q, from the series of Stirling's
# type for u - log(1+u) = q^2/2 (Temme, "Asymptotic expansions of the incomplete gamma functions").
_SERIES = (
    1.0, -1 / 3, 1 / 36, 1 / 270, 1 / 4320, -1 / 17010, -139 / 5443200, -1 / 204120,
    -571 / 2351462400, 281 / 1515591000,
)  # fmt: skip
_SMALL = 0.1  # below it the series is exact to the last bit, and Newton's residual is not


def optimum(save: Real, mtbf: Real) -> Real:
    """Return the useful work between two saves with the largest goodput.

    It does not depend on restart and detection. 0 for a free save, infinity if nothing fails, and
    never above `mtbf`. Relative error below 1e-13.
    """
    require("the save cost", save, at_least=0)
    require("the mean time between failures", mtbf, above=0, finite=False)
    fails = mtbf < math.inf
    mean = choose(fails, mtbf, 1.0)
    return choose(fails, optimal_share(save / mean) * mean, choose(save > 0, math.inf, 0.0))


def optimal_share(ratio: Real) -> Real:
    """Return tau*/M for a ratio C/M >= 0: the root x in [0, 1) of -log(1-x) - x = C/M.

    It is also the least waste if restart and detection cost nothing. Relative error below 1e-13.
    """
    q = sqrt(2 * ratio)
    small = smaller(q, 1.0)
    near = 0.0 * small
    for coefficient in reversed(_SERIES):
        near = (near + coefficient) * small
    # With g = log(1 - x) = -(x + c): g - (e^g - 1) + c = 0, well conditioned for any c.
    c = choose(q < _SMALL, 1.0, ratio)
    g = -(c + choose(q < 1, near, 1.0))
    for _ in range(4):
        g = g + (g - expm1(g) + c) / expm1(g)
    return choose(q < _SMALL, near, -expm1(g))


def outcome(
    interval: Real,
    save: Real,
    mtbf: Real,
    *,
    restart: Real = 0.0,
    detect: Real = 0.0,
    safe_recovery: bool = False,
) -> Outcome:
    """Return where the wall time goes with a save after every `interval` of work.

    Nothing overflows: as the interval grows far beyond `mtbf`, goodput goes to 0. With
    `safe_recovery` no failure strikes a restart.
    """
    require("the interval", interval, above=0)
    require("the save cost", save, at_least=0)
    recovery = divide(mtbf, restart, detect, safe=safe_recovery)
    rate, length = 1 / mtbf, interval + save
    kept = recovery.running * exp(-length * rate) / exposed(rate, length)
    return Outcome(
        model="exact, exponential failures",
        interval=interval,
        useful=kept * interval,
        save=kept * save,
        lost=recovery.running - kept * length,
        detection=recovery.detection,
        restart=recovery.restart,
    )
