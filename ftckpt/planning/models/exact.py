"""Exponential failures and blocking saves, without approximation: the default model.

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

from .arithmetic import Real, choose, exp, expm1, exposed, require, smaller, sqrt
from .outcome import Outcome
from .recovery import divide

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
