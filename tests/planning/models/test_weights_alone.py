from __future__ import annotations

from random import Random
from statistics import fmean, stdev

import pytest

from ftckpt.errors import UsageError
from ftckpt.planning import Plain
from ftckpt.planning.models.weights_alone import weights_only, with_pauses

JOB = Plain(mtbf=7200.0, save=60.0).outcome


def simulated(
    random: Random, period: float, between: int, pause: float, rewarm: float, periods: int
) -> tuple[float, float]:
    """Return the share of useful work of `JOB` with restarts from weights, and its error.

    One failure after the other: time goes by until the next one, whatever the job does.
    """
    gap, save, mtbf = period / (between + 1), 60.0, 7200.0
    walls = []
    left = random.expovariate(1 / mtbf)
    for _ in range(periods):
        wall, done, owed = 0.0, 0, 0.0
        while done <= between:
            needed = owed + gap + (pause if done < between else save)
            if left >= needed:
                left, wall, done, owed = left - needed, wall + needed, done + 1, 0.0
                continue
            wall, left = wall + left, random.expovariate(1 / mtbf)
            owed = rewarm if done * gap > rewarm else 0.0
            done = done if done * gap > rewarm else 0
        walls.append(wall)
    mean = fmean(walls)
    return period / mean, period / mean**2 * stdev(walls) / periods**0.5


@pytest.mark.parametrize(
    ("period", "between", "rewarm"),
    [(1200.0, 1, 0.0), (1200.0, 3, 60.0), (1200.0, 3, 500.0), (2600.0, 9, 700.0)],
)
def test_the_worth_is_that_of_failures_at_random_times(
    period: float, between: int, rewarm: float
) -> None:
    found = weights_only(period, 7200.0, between, 5.0, rewarm, JOB, full=60.0)
    useful, error = simulated(Random(between), period, between, 5.0, rewarm, 40_000)
    with_them = float(JOB(period).useful) + found.worth
    assert abs(with_them - useful) < 4 * error
    # The saves are pauses in a period that is longer by them.
    paused = float(JOB(period + 5.0 * between).useful) * period / (period + 5.0 * between)
    assert found.cost == pytest.approx(float(JOB(period).useful) - paused)
    assert found.worth == found.gain - found.cost


def test_the_worth_is_that_of_an_independent_simulation() -> None:
    """Two jobs and what a simulation of somebody else's said of them, with its error."""
    for mtbf, save, period, between, pause, rewarm, said, error in (
        (8750.0, 194.0, 1715.553, 8, 9.29, 369.0, 0.0182, 0.0002),
        (18700.0, 41.4, 1216.886, 3, 5.89, 249.0, 0.0013, 0.0002),
    ):
        restart = {8750.0: 162.0, 18700.0: 27.4}[mtbf]
        job = Plain(mtbf=mtbf, save=save, restart=restart).outcome
        found = weights_only(period, mtbf, between, pause, rewarm, job, full=save)
        assert found.worth == pytest.approx(said, abs=3 * error)


def test_the_gain_of_few_failures_is_of_first_order() -> None:
    job = Plain(mtbf=1e7, save=60.0).outcome
    found = weights_only(1200.0, 1e7, 3, 0.0, 60.0, job, full=60.0)
    gains = (max(0.0, k * 300.0 - 60.0) for k in (1, 2, 3))
    assert found.gain == pytest.approx(sum(gains) / 4 / 1e7, rel=0.06)
    endless = Plain(mtbf=60.0, save=0.0).outcome
    # A period that never ends without a failure gains nothing that a double shows.
    assert weights_only(1e7, 60.0, 3, 5.0, 60.0, endless, full=0.0).gain == 0


def test_where_a_restart_needs_the_optimizer_they_only_cost() -> None:
    found = weights_only(1200.0, 7200.0, 3, 5.0, None, JOB, full=60.0)
    assert (found.gain, found.worth) == (0, -found.cost)
    assert found.most_rewarm_s == 900
    assert weights_only(1200.0, 7200.0, 3, 5.0, 900.0, JOB, full=60.0).gain == 0
    assert weights_only(1200.0, 7200.0, 3, 5.0, 899.0, JOB, full=60.0).gain > 0


def test_what_is_out_of_range_is_refused() -> None:
    bads: list[tuple[float, float, int, float, float | None]] = [
        (0, 1, 1, 1, None),
        (1, 0, 1, 1, None),
        (1, 1, 0, 1, None),
        (1, 1, 1, -1, 0.0),
    ]
    for bad in bads:
        with pytest.raises(UsageError):
            weights_only(*bad, JOB, full=60.0)


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
