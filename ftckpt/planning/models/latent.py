"""Silent errors that the loss shows, some time after they struck: every save may hold one.

Bulks of W of work and a save C, with fail-stop failures at rate lf per second of running and silent
errors at rate ls per second of work, both exponential. An error is noticed after a time with mean m
(exponential, of running); training then goes back to the last save before the error, behind all
saves made since. Until then all work is wasted, and fail-stop failures cost their recovery alone.

Between two times of going back, W + C succeeds with probability q = e^(-lf (W + C)) e^(-ls W), so
q / (1 - q) bulks are kept on average. With a = lf + ls, a bulk runs for

    T = (1 - e^(-a W)) / a + e^(-a W) (1 - e^(-lf C)) / lf

on average and ends in an error with probability s = (1 - e^(-a W)) ls / a. Goodput is the kept work
over the mean time between two such returns, where an error adds m of running, lf m recoveries of
fail-stop failures, and one restart. It is exact under these assumptions, by renewal and reward; own
derivation, held against `simulation.silent` by the tests. It assumes that a copy from before the
error still exists: `silent.unrecoverable` gives the chance that it does not.

To first order in ls m the best interval is Young's for the rate lf + ls, whatever m is.
"""

from __future__ import annotations

import math

from .arithmetic import Real, exp, expm1, exposed, peak, require
from .young_daly import Outcome


def outcome(
    interval: Real,
    save: Real,
    silent_rate: Real,
    failure_rate: Real,
    latency: Real,
    *,
    restart: Real = 0.0,
    detect: Real = 0.0,
) -> Outcome:
    """Return where the wall time goes; `latency` is m, `silent_rate` ls, `failure_rate` lf."""
    require("the interval", interval, above=0)
    require("the save cost", save, at_least=0)
    require("the silent-error rate", silent_rate, at_least=0, unit="per second")
    require("the failure rate", failure_rate, above=0, unit="per second")
    require("the latency", latency, at_least=0)
    require("the restart time", restart, at_least=0)
    require("the detection time", detect, at_least=0)
    both = failure_rate + silent_rate
    clean = exp(-both * interval)
    kept = clean * exp(-failure_rate * save)
    running = exposed(both, interval) + clean * exposed(failure_rate, save)
    wrong = -expm1(-both * interval) * silent_rate / both
    failed = 1 - kept - wrong
    # Seconds for each bulk that was begun; all of them times p, the chance that a restart is done.
    p = exp(-failure_rate * restart)
    dirty = wrong * latency
    crashes = failed + failure_rate * dirty
    returns = failed + wrong + failure_rate * dirty
    restarting = returns * exposed(failure_rate, restart)
    detection = detect * (crashes * p + returns * (1 - p))
    whole = (running + dirty) * p + restarting + detection
    share = p / whole
    return Outcome(
        model="exact, silent errors noticed late and exponential failures",
        interval=interval,
        useful=share * kept * interval,
        save=share * kept * save,
        lost=share * (running + dirty - kept * (interval + save)),
        detection=detection / whole,
        restart=restarting / whole,
    )


def optimum(
    save: float,
    silent_rate: float,
    failure_rate: float,
    latency: float,
    *,
    restart: float = 0.0,
    detect: float = 0.0,
) -> float:
    """Return the work between two saves, in seconds, with the largest goodput; `save` > 0.

    Searched within a factor of 50 of Young's interval, to about 1e-7.
    """
    require("the save cost", save, above=0)

    def goodput(interval: Real) -> Real:
        return outcome(
            interval, save, silent_rate, failure_rate, latency, restart=restart, detect=detect
        ).useful

    return float(peak(goodput, math.sqrt(2 * save / (failure_rate + silent_rate)), 50.0))
