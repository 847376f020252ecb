"""Failure data: units, combination, and how sure a count is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import UsageError
from ftckpt.planning import exposure, rates
from ftckpt.planning.rates import DAY, HOUR, YEAR, Cause


def test_one_rate_in_four_units() -> None:
    hourly = 1 / (50_000 * HOUR)
    assert rates.from_mtbf(50_000 * HOUR, 8) == pytest.approx(8 * hourly)
    assert rates.from_afr(YEAR / (50_000 * HOUR), 8) == pytest.approx(8 * hourly)
    assert rates.from_fit(20_000, 8) == pytest.approx(8 * hourly)
    assert rates.from_daily(24 / 50_000, 8) == pytest.approx(8 * hourly)


def test_causes_add_up_and_have_their_shares() -> None:
    found = rates.combine(
        [
            Cause("gpu", 0.16384 / HOUR),
            Cause("host", 0.064 / HOUR),
            Cause("switch", 0.00016 / HOUR),
            Cause("switch", 0.00016 / HOUR),
        ]
    )
    assert found.mtbf / HOUR == pytest.approx(4.383, abs=5e-4)
    assert found.share == {
        "gpu": pytest.approx(0.718, abs=5e-4),
        "host": pytest.approx(0.281, abs=6e-4),
        "switch": pytest.approx(0.0014, abs=5e-5),
    }
    assert rates.combine(found.causes, burn_in=1.3).mtbf == pytest.approx(found.mtbf / 1.3)


def test_nothing_that_fails() -> None:
    found = rates.combine([Cause("gpu", 0.0)])
    assert found.mtbf == math.inf
    assert found.share == {"gpu": 0}
    assert rates.from_mtbf(math.inf, 16384) == 0


def test_four_hundred_and_nineteen_in_54_days() -> None:
    found = rates.observed(419, 54 * DAY)
    assert 1 / found.per_second / HOUR == pytest.approx(3.093, abs=5e-4)
    assert 1 / found.high / HOUR == pytest.approx(2.81, abs=5e-3)
    assert 1 / found.low / HOUR == pytest.approx(3.41, abs=5e-3)
    assert rates.observed(0, DAY).low == 0


@pytest.mark.parametrize(
    ("count", "low", "high"),
    # Garwood's table, 95 %.
    [(0, 0, 3.69), (1, 0.0253, 5.57), (3, 0.619, 8.77), (10, 4.80, 18.39), (50, 37.11, 65.92)],
)
def test_printed_limits(count: int, low: float, high: float) -> None:
    assert exposure.mean_limits(count) == pytest.approx((low, high), rel=2e-3)


@given(st.integers(1, 400), st.sampled_from([0.5, 0.9, 0.95, 0.999]))
def test_limits_leave_the_same_chance_on_either_side(count: int, confidence: float) -> None:
    low, high = exposure.mean_limits(count, confidence)

    def below(mean: float, events: int) -> float:
        """Sum the probabilities of fewer than `events` one by one."""
        return math.fsum(
            math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(events)
        )

    tail = (1 - confidence) / 2
    assert 1 - below(low, count) == pytest.approx(tail, rel=1e-6)
    assert below(high, count + 1) == pytest.approx(tail, rel=1e-6)


def test_many_failures_are_nearly_normal() -> None:
    low, high = exposure.mean_limits(10**7)
    assert low == pytest.approx(10**7 - 1.96 * math.sqrt(10**7), rel=1e-6)
    assert high == pytest.approx(10**7 + 1.96 * math.sqrt(10**7), rel=1e-6)


def test_nonsense_is_refused() -> None:
    with pytest.raises(UsageError, match=r"whole number, but is 1\.5"):
        exposure.mean_limits(1.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the confidence must be at most"):
        exposure.mean_limits(3, 1.0)
    with pytest.raises(UsageError, match="nothing says how often the job fails"):
        rates.combine([])
    with pytest.raises(UsageError, match="failure rate of gpu must be at least 0"):
        rates.combine([Cause("gpu", -1.0)])
    with pytest.raises(UsageError, match="the number of parts must be at least 0"):
        rates.from_afr(0.05, -3)
    with pytest.raises(UsageError, match="the time of observation must be above 0"):
        rates.observed(3, 0)
