from __future__ import annotations

from random import Random

import pytest

from ftckpt.errors import UsageError
from ftckpt.planning import Plain
from ftckpt.planning.models.weights_alone import weights_only, with_pauses

JOB = Plain(mtbf=7200.0, save=60.0).outcome


def lost(x: float, period: float, between: int, rewarm: float) -> float:
    """What a failure costs that comes x after a full save, if the better copy is taken."""
    gap = period / (between + 1)
    return min(x, x % gap + rewarm) if x >= gap else x


@pytest.mark.parametrize(("between", "rewarm"), [(1, 0.0), (3, 60.0), (3, 500.0), (9, 700.0)])
def test_the_gain_is_that_of_failures_at_random_times(between: int, rewarm: float) -> None:
    random, period, mtbf = Random(between), 1200.0, 7200.0
    times = [random.uniform(0, period) for _ in range(100_000)]
    saved = sum(x - lost(x, period, between, rewarm) for x in times) / len(times)
    found = weights_only(period, mtbf, between, 5.0, rewarm, JOB)
    assert found.gain == pytest.approx(saved / mtbf, rel=0.02, abs=1e-5)
    # The saves are pauses in a period that is longer by them.
    paused = float(JOB(period + 5.0 * between).useful) * period / (period + 5.0 * between)
    assert found.cost == pytest.approx(float(JOB(period).useful) - paused)
    assert found.worth == found.gain - found.cost


def test_where_a_restart_needs_the_optimizer_they_only_cost() -> None:
    found = weights_only(1200.0, 7200.0, 3, 5.0, None, JOB)
    assert (found.gain, found.worth) == (0, -found.cost)
    assert found.most_rewarm_s == 900
    assert weights_only(1200.0, 7200.0, 3, 5.0, 900.0, JOB).gain == 0
    assert weights_only(1200.0, 7200.0, 3, 5.0, 899.0, JOB).gain > 0


def test_what_is_out_of_range_is_refused() -> None:
    bads: list[tuple[float, float, int, float, float | None]] = [
        (0, 1, 1, 1, None),
        (1, 0, 1, 1, None),
        (1, 1, 0, 1, None),
        (1, 1, 1, -1, 0.0),
    ]
    for bad in bads:
        with pytest.raises(UsageError):
            weights_only(*bad, JOB)


def test_the_goodput_of_a_plan_has_the_saves_in_it() -> None:
    """Against failures that are drawn one by one, the pauses among the work."""
    random, work, pauses, save, mtbf = Random(5), 1334.0, 1500.0, 90.0, 10_800.0
    useful = wall = 0.0
    for _ in range(40_000):
        segment, failure = work + pauses + save, random.expovariate(1 / mtbf)
        useful += work if failure >= segment else 0.0
        wall += min(segment, failure)
    job = Plain(mtbf=mtbf, save=save)
    found = with_pauses(job.outcome, work, pauses)
    assert float(found.useful) == pytest.approx(useful / wall, abs=0.004)
    assert float(found.useful) == pytest.approx(0.397, abs=0.001)
    shares = (found.useful, found.save, found.lost, found.detection, found.restart, found.waiting)
    assert sum(map(float, shares)) == pytest.approx(1)
    alike = with_pauses(job.outcome, work, 0.0)
    assert alike == job.outcome(work)
