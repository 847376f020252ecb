"""Silent errors: verify before each save, so that every copy is good.

A bulk is W of work, a verification V that finds every error in it, and a save C. A silent error
costs the bulk and a restart R; a fail-stop failure also costs D, and may strike at any time except
detection. With both kinds exponential, at rates ls per second of work and lf per second,

    E = A / (e^(-lf (W + V)) e^(-ls W) e^(-lf C)),   goodput = W / E

where A is the mean time of one attempt with the recovery that follows it. With lf = 0 it is (W + V)
e^(ls W) + R (e^(ls W) - 1) + C. To first order (Benoit, Robert, Sun et al.)

    W* = sqrt((V + C)/(ls + lf/2)),   waste H* = 2 sqrt((V + C)(ls + lf/2)).

`interval` is W, `verify` V, `silent_rate` ls and `failure_rate` lf, each >= 0.
"""

from __future__ import annotations

import math

from .arithmetic import Real, exp, expm1, exposed, peak, require, sqrt
from .young_daly import Outcome


def first_order(
    verify: Real, save: Real, silent_rate: Real, failure_rate: Real
) -> tuple[Real, Real]:
    """Return the first-order interval in seconds of work, and its waste as a fraction.

    Good while (V + C)(ls + lf/2) is far below 1: at a waste of 14 %, 1 percentage point. UsageError
    also if nothing ever fails.
    """
    _require(verify, save, silent_rate, failure_rate)
    rate = silent_rate + failure_rate / 2
    require("the rate of failures and silent errors", rate, above=0, unit="per second")
    return sqrt((verify + save) / rate), 2 * sqrt((verify + save) * rate)


def outcome(
    interval: Real,
    verify: Real,
    save: Real,
    silent_rate: Real,
    failure_rate: Real,
    *,
    restart: Real = 0.0,
    detect: Real = 0.0,
) -> Outcome:
    """Return where the wall time goes when W of work is verified and then saved.

    `save` of the result holds verification and save of the kept bulks. `detect` follows fail-stop
    failures only.
    """
    require("the interval", interval, above=0)
    _require(verify, save, silent_rate, failure_rate)
    require("the restart time", restart, at_least=0)
    require("the detection time", detect, at_least=0)
    checked, clean = exp(-failure_rate * (interval + verify)), exp(-silent_rate * interval)
    done = exp(-failure_rate * save)
    # Means of one attempt at a bulk: seconds of running, recoveries after each kind of failure.
    saving = checked * clean
    running = exposed(failure_rate, interval + verify) + saving * exposed(failure_rate, save)
    wrong = -checked * expm1(-silent_rate * interval)
    failed = -expm1(-failure_rate * (interval + verify)) - saving * expm1(-failure_rate * save)
    # A restart finishes with probability p; each that does not costs D and another one. All times
    # are multiplied by p, which may be too small to divide by.
    p = exp(-failure_rate * restart)
    running, restarting = running * p, (wrong + failed) * exposed(failure_rate, restart)
    detection = detect * (failed * p + (wrong + failed) * (1 - p))
    whole = running + restarting + detection
    kept = saving * done * p / whole
    return Outcome(
        model="exact, silent errors and exponential failures",
        interval=interval,
        useful=kept * interval,
        save=kept * (verify + save),
        lost=running / whole - kept * (interval + verify + save),
        detection=detection / whole,
        restart=restarting / whole,
    )


def optimum(
    verify: Real,
    save: Real,
    silent_rate: Real,
    failure_rate: Real,
    *,
    restart: Real = 0.0,
    detect: Real = 0.0,
) -> Real:
    """Return the work between two verified saves, in seconds, with the largest exact goodput.

    Searched within a factor of 50 of the first-order interval, to about 1e-7. V + C must be above
    0.
    """
    require("the cost of verifying and saving", verify + save, above=0)
    guess, _ = first_order(verify, save, silent_rate, failure_rate)

    def goodput(interval: Real) -> Real:
        return outcome(
            interval, verify, save, silent_rate, failure_rate, restart=restart, detect=detect
        ).useful

    return peak(goodput, guess, 50.0)


def unrecoverable(keep_last: Real, period: Real, latency: Real) -> Real:
    """Return the chance that an error is noticed only when every kept copy already has it.

    e^(-k P/m) for errors with an exponentially distributed time to discovery: k = `keep_last` kept
    copies, >= 0; P = `period`, seconds of wall time between two saves, > 0; m = `latency`, mean
    seconds from an error to its discovery, > 0.
    """
    require("the number of kept checkpoints", keep_last, at_least=0, unit="")
    require("the period", period, above=0)
    require("the latency", latency, above=0)
    return exp(-keep_last * period / latency)


def keep_last(risk: float, period: float, latency: float) -> int:
    """Return the number of copies for which `unrecoverable` is at most `risk`, in (0, 1]."""
    require("the accepted risk", risk, above=0, at_most=1, unit="")
    require("the period", period, above=0)
    require("the latency", latency, above=0)
    # A risk of e^-2 must not need three copies because its logarithm was -2.0000000001.
    return max(1, math.ceil(-math.log(risk) * latency / period - 1e-9))


def _require(verify: Real, save: Real, silent_rate: Real, failure_rate: Real) -> None:
    require("the verification time", verify, at_least=0)
    require("the save cost", save, at_least=0)
    require("the silent-error rate", silent_rate, at_least=0, unit="per second")
    require("the failure rate", failure_rate, at_least=0, unit="per second")
