from __future__ import annotations

import math

import pytest

from ftckpt.errors import UsageError
from ftckpt.planning import Counted, combine, rates

HOUR = 3600.0


def test_a_cluster_of_parts_adds_up() -> None:
    # 4,096 GPUs of 25,000 h, 512 hosts of 8,000 h, 32 switches of 100,000 h.
    failures = combine(
        [
            rates.Cause("switch", float(rates.from_mtbf(100_000 * HOUR, 32))),
            rates.Cause("gpu", float(rates.from_mtbf(25_000 * HOUR, 4096))),
            rates.Cause("host", float(rates.from_mtbf(8_000 * HOUR, 512))),
        ]
    )
    assert failures.mtbf / HOUR == pytest.approx(4.38288920056101, rel=1e-9)
    assert list(failures.rates.share) == ["gpu", "host", "switch"]
    assert failures.rates.share["gpu"] == pytest.approx(0.16384 / 0.22816)
    assert failures.confidence is None
    assert failures.low == failures.high == failures.rates.per_second


def test_a_count_brings_its_error_bars() -> None:
    failures = combine([], [Counted("counted", 419, 54 * 86400.0)])
    assert failures.mtbf / HOUR == pytest.approx(3.0930787589498805, rel=1e-9)
    low, high = (limit / HOUR for limit in failures.mtbf_limits)
    assert (round(low, 2), round(high, 2)) == (2.81, 3.41)


def test_what_is_known_adds_no_doubt() -> None:
    counted = [Counted("counted", 9, 9 * HOUR)]
    alone, both = combine([], counted), combine([rates.Cause("job", 1 / HOUR)], counted)
    assert both.high - both.rates.per_second == pytest.approx(alone.high - alone.rates.per_second)
    assert both.low == pytest.approx(alone.low + 1 / HOUR)


def test_burn_in_multiplies_the_rate_and_its_limits() -> None:
    counted = [Counted("counted", 9, 9 * HOUR)]
    plain, new = combine([], counted), combine([], counted, burn_in=1.3)
    for name in ("low", "high"):
        assert getattr(new, name) == pytest.approx(1.3 * getattr(plain, name))
    assert new.mtbf == pytest.approx(plain.mtbf / 1.3)


def test_no_failure_seen_beside_a_known_cause_is_no_upper_limit_of_the_mtbf() -> None:
    failures = combine([rates.Cause("job", 1e-9)], [Counted("counted", 0, HOUR)])
    assert failures.low == pytest.approx(1e-9)
    assert failures.high > 3 / HOUR
    assert math.isfinite(failures.mtbf_limits[1])


@pytest.mark.parametrize("counted", [[], [Counted("counted", 0, HOUR)]])
def test_a_job_that_never_fails_is_not_planned(counted: list[Counted]) -> None:
    with pytest.raises(UsageError, match="fail"):
        combine([], counted)
