"""Silent errors: the special cases, an event loop, and how many copies to keep."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import UsageError
from ftckpt.planning.models import silent, young_daly

TIME = st.floats(0.01, 3000)


@given(TIME, TIME, TIME, TIME)
def test_without_silent_errors_verification_is_part_of_the_save(
    interval: float, save: float, restart: float, detect: float
) -> None:
    ours = silent.outcome(interval, 10, save, 0, 1 / 7200, restart=restart, detect=detect)
    theirs = young_daly.outcome(interval, save + 10, 7200, restart=restart, detect=detect)
    for share in ("useful", "save", "detection", "restart"):
        assert getattr(ours, share) == pytest.approx(getattr(theirs, share), rel=1e-9)


@given(TIME, TIME, TIME, TIME, st.floats(1e-7, 1e-2))
def test_silent_errors_alone(
    interval: float, verify: float, save: float, restart: float, rate: float
) -> None:
    found = silent.outcome(interval, verify, save, rate, 0, restart=restart)
    again = math.expm1(rate * interval)
    wall = (interval + verify) * (1 + again) + restart * again + save
    assert found.useful == pytest.approx(interval / wall, rel=1e-9)
    assert found.detection == 0


def loop_goodput(interval: float, rng: random.Random, verified: int) -> float:
    """Return the goodput of a job that goes through so many verified saves, event by event."""
    verify, save, restart, detect, silent_mean, failure_mean = 20, 60, 60, 30, 86400, 10800
    wall = 0.0
    until_failure = rng.expovariate(1 / failure_mean)

    def survives(seconds: float) -> bool:
        nonlocal wall, until_failure
        if until_failure < seconds:
            wall += until_failure + detect
            until_failure = rng.expovariate(1 / failure_mean)
            return False
        wall += seconds
        until_failure -= seconds
        return True

    done = 0
    while done < verified:
        wrong = rng.expovariate(1 / silent_mean) < interval
        if survives(interval + verify) and not wrong and survives(save):
            done += 1
        else:
            while not survives(restart):
                pass
    return interval * verified / wall


def test_an_event_loop_agrees() -> None:
    interval = 1127.8
    runs = [loop_goodput(interval, random.Random(seed), 2000) for seed in range(24)]
    error = statistics.stdev(runs) / math.sqrt(len(runs))
    found = silent.outcome(interval, 20, 60, 1 / 86400, 1 / 10800, restart=60, detect=30)
    assert error < 1e-3
    assert abs(statistics.mean(runs) - float(found.useful)) < 4 * error


def test_both_kinds_at_the_optimum() -> None:
    # First order: 1175.8 s and 13.6 %; simulated elsewhere with R = 60: 86.7 +- 0.1 %.
    best = silent.optimum(20, 60, 1 / 86400, 1 / 10800, restart=60)
    goodput = silent.outcome(best, 20, 60, 1 / 86400, 1 / 10800, restart=60).useful
    assert goodput == pytest.approx(0.867, abs=1e-3)
    first_order, waste = silent.first_order(20, 60, 1 / 86400, 1 / 10800)
    assert best == pytest.approx(first_order, rel=0.05)
    assert 1 - goodput == pytest.approx(waste, abs=0.01)
    for factor in (0.9, 1.1):
        other = silent.outcome(best * factor, 20, 60, 1 / 86400, 1 / 10800, restart=60)
        assert other.useful < goodput


def test_without_silent_errors_the_search_finds_the_exact_optimum() -> None:
    assert silent.optimum(0, 120, 0, 1 / 7593.75) == pytest.approx(
        young_daly.optimum(120.0, 7593.75), rel=1e-6
    )


def test_how_many_copies_outlast_the_latency() -> None:
    assert silent.unrecoverable(3, 600, 3600) == pytest.approx(math.exp(-0.5))
    assert silent.keep_last(math.exp(-2), 600, 3600) == 12
    assert silent.keep_last(1, 600, 3600) == 1
    for risk in (0.5, 0.1, 1e-3):
        kept = silent.keep_last(risk, 600, 3600)
        assert silent.unrecoverable(kept, 600, 3600) <= risk * (1 + 1e-9)
        assert silent.unrecoverable(kept - 1, 600, 3600) > risk


def test_nothing_that_fails_has_no_optimum() -> None:
    with pytest.raises(UsageError, match="rate of failures and silent errors must be above 0"):
        silent.optimum(1, 1, 0, 0)
    with pytest.raises(UsageError, match="cost of verifying and saving must be above 0"):
        silent.optimum(0, 0, 1e-5, 1e-5)


def test_nothing_overflows() -> None:
    found = silent.outcome(1e6, 1e6, 1e6, 1.0, 1.0, restart=1e6, detect=1)
    assert found.useful == 0
    assert 0 < float(found.detection) < 1
