"""The textbook rules, for comparison: Young, Daly, and the effective training time ratio.

They are first order in C/M: their intervals are good, their predictions of waste are not. At C/M =
0.1 Young's interval is 17 % too long and costs 0.3 percentage points of goodput, while the
first-order waste is 44.7 % instead of 38.3 %. Take at most the interval from here, and its outcome
from `exact`.

Three conventions of waste are in use; "when does waste pass 20 % with C = 90 s?" has the answers
75.0, 68.0 (`per_period`) and, exactly, 64.8 minutes between failures.
"""

from __future__ import annotations

from .arithmetic import Real, choose, require, smaller, sqrt
from .outcome import Outcome


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
