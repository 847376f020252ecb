from __future__ import annotations

from random import Random

import pytest

from ftckpt.errors import UsageError
from ftckpt.planning.models.weights_alone import weights_only


def lost(x: float, period: float, between: int, rewarm: float) -> float:
    """What a failure costs that comes x after a full save, if the better copy is taken."""
    gap = period / (between + 1)
    return min(x, x % gap + rewarm) if x >= gap else x


@pytest.mark.parametrize(("between", "rewarm"), [(1, 0.0), (3, 60.0), (3, 500.0), (9, 700.0)])
def test_the_gain_is_that_of_failures_at_random_times(between: int, rewarm: float) -> None:
    random, period, mtbf = Random(between), 1200.0, 7200.0
    times = [random.uniform(0, period) for _ in range(100_000)]
    saved = sum(x - lost(x, period, between, rewarm) for x in times) / len(times)
    found = weights_only(period, mtbf, between, 5.0, rewarm)
    assert found.gain == pytest.approx(saved / mtbf, rel=0.02, abs=1e-5)
    assert found.cost == pytest.approx(5.0 * between / period)
    assert found.worth == found.gain - found.cost


def test_where_a_restart_needs_the_optimizer_they_only_cost() -> None:
    found = weights_only(1200.0, 7200.0, 3, 5.0, None)
    assert (found.gain, found.worth) == (0, -3 * 5 / 1200)
    assert found.most_rewarm_s == 900
    assert weights_only(1200.0, 7200.0, 3, 5.0, 900.0).gain == 0
    assert weights_only(1200.0, 7200.0, 3, 5.0, 899.0).gain > 0


def test_what_is_out_of_range_is_refused() -> None:
    for bad in ((0, 1, 1, 1, None), (1, 0, 1, 1, None), (1, 1, 0, 1, None), (1, 1, 1, -1, 0.0)):
        with pytest.raises(UsageError):
            weights_only(*bad)
