"""The case for checkpoints: what happens without them. Logarithms where the numbers need them."""

from __future__ import annotations

import math

from ftckpt.planning.models.arithmetic import Real, expm1, log1p, require


def expected_failures(rate: Real, seconds: Real) -> Real:
    """Return how many failures come in a time on average.

    Args:
        rate: failures per second, >= 0.
        seconds: >= 0.

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    _require(rate, seconds)
    return rate * seconds


def probability(rate: Real, seconds: Real) -> Real:
    """Return the probability of at least one failure, 1 - e^(-rate seconds).

    Args and errors as for `expected_failures`.
    """
    _require(rate, seconds)
    return -expm1(-rate * seconds)


def probability_of_trials(chance: Real, trials: Real) -> Real:
    """Return the probability that at least one of independent trials fails, 1 - (1 - p)^n.

    For a chance of failure per machine and day, with machines times days as trials.

    Args:
        chance: p, of each trial, in [0, 1).
        trials: n, >= 0.

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    require("the chance of failure", chance, at_least=0, at_most=1 - 1e-16, unit="")
    require("the number of trials", trials, at_least=0, unit="")
    return -expm1(trials * log1p(-chance))


def time_to_first(rate: Real) -> Real:
    """Return the mean seconds until the first failure, 1 / rate.

    Args:
        rate: failures per second, > 0.

    Raises:
        UsageError: the rate is out of range or not a number.
    """
    require("the failure rate", rate, above=0, unit="per second")
    return 1 / rate


def log10_completion(
    work: float, mtbf: float, *, restart: float = 0.0, detect: float = 0.0
) -> float:
    """Return the decimal logarithm of the mean seconds to finish without any checkpoint.

    E = (M + D) e^(R/M) (e^(T/M) - 1): every failure begins the work anew. As a number it overflows
    from T = 709 M on; its logarithm does not.

    Args:
        work: T, seconds of useful work, > 0.
        mtbf: M, seconds, > 0.
        restart: R, seconds, >= 0.
        detect: D, seconds, >= 0.

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    require("the work", work, above=0)
    require("the mean time between failures", mtbf, above=0)
    require("the restart time", restart, at_least=0)
    require("the detection time", detect, at_least=0)
    x = work / mtbf
    return (math.log(mtbf + detect) + restart / mtbf + x + math.log(-math.expm1(-x))) / math.log(10)


def _require(rate: Real, seconds: Real) -> None:
    require("the failure rate", rate, at_least=0, unit="per second")
    require("the time", seconds, at_least=0)
