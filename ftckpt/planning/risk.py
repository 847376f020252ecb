"""The case for checkpoints: a run without them. Logarithms if the numbers need them.

Rates are failures per second; arguments out of range raise UsageError.
"""

from __future__ import annotations

import math

from ftckpt.planning.models.arithmetic import Real, expm1, log1p, require


def expected_failures(rate: Real, seconds: Real) -> Real:
    """Return the mean number of failures in a time."""
    _require(rate, seconds)
    return rate * seconds


def probability(rate: Real, seconds: Real) -> Real:
    """Return the probability of at least one failure, 1 - e^(-rate seconds)."""
    _require(rate, seconds)
    return -expm1(-rate * seconds)


def probability_of_trials(chance: Real, trials: Real) -> Real:
    """Return the probability that at least one of n independent trials fails, 1 - (1 - p)^n.

    For example p per machine and day, with machines times days as trials; p in [0, 1).
    """
    require("the chance of failure", chance, at_least=0, at_most=1 - 1e-16, unit="")
    require("the number of trials", trials, at_least=0, unit="")
    return -expm1(trials * log1p(-chance))


def time_to_first(rate: Real) -> Real:
    """Return the mean seconds until the first failure, 1 / rate."""
    require("the failure rate", rate, above=0, unit="per second")
    return 1 / rate


def log10_completion(
    work: float, mtbf: float, *, restart: float = 0.0, detect: float = 0.0
) -> float:
    """Return the decimal logarithm of the mean seconds to finish without any checkpoint.

    E = (M + D) e^(R/M) (e^(T/M) - 1): every failure restarts the work from the beginning. As a
    number it overflows from T = 709 M on; its logarithm does not. `work` is T, seconds of useful
    work, > 0; the others as in `ftckpt.planning.models`.
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
