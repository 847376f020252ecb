"""Parts that age and silent errors: the simulation against what is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ftckpt.errors import UsageError
from ftckpt.planning.models import latent, silent, young_daly
from ftckpt.planning.models.spot import Costs
from ftckpt.planning.simulation import (
    AgeingParts,
    Exponential,
    Fleet,
    SilentJob,
    agreement,
    simulate,
    simulate_silent,
)
from tests.campaign import examples

HOUR = 3600.0
RUNS, FAILURES = 40, examples(150, 1500)


def test_parts_without_memory_are_a_poisson_process() -> None:
    law = Fleet([AgeingParts("gpu", 64, 64 * 2 * HOUR, 1.0)], rest=1 / (6 * HOUR))
    assert law.mean == pytest.approx(1.5 * HOUR)
    found = simulate(900.0, Costs(60.0, restart=300.0), law, runs=RUNS, failures=FAILURES)
    closed = young_daly.outcome(900.0, 60.0, 1.5 * HOUR, restart=300.0)
    assert agreement(float(closed.useful), found).agrees


def first_gaps(shape: float, number: int, failures: int) -> float:
    """Return the mean time of the first failures of a new fleet whose mean is one an hour."""
    law = Fleet([AgeingParts("gpu", number, number * HOUR, shape)])
    draw = law.sampler(np.random.default_rng(1), RUNS)
    return float(draw(failures).mean())


def test_new_parts_fail_as_often_as_their_hazard_says() -> None:
    """Of n new parts n (t/s)^k have failed by t, while few were renewed."""
    shape, number, failures = 0.7, 2000, 100
    scale = number * HOUR / math.gamma(1 + 1 / shape)
    time = scale * (failures / number) ** (1 / shape)
    # A few of those that failed were renewed and failed again: a little sooner than the hazard.
    assert first_gaps(shape, number, failures) * failures == pytest.approx(time, rel=0.1)
    assert first_gaps(3.0, number, failures) > 5 * HOUR


def test_an_old_fleet_is_nearly_a_poisson_process() -> None:
    law = Fleet([AgeingParts("gpu", 32, 32 * HOUR, 0.7)])
    draw = law.sampler(np.random.default_rng(2), 20)
    draw(3000)  # each part was renewed a hundred times
    gaps = draw(1500)
    assert gaps.mean() == pytest.approx(HOUR, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.08)


def test_every_failure_of_a_fleet_is_given_once_and_in_order() -> None:
    parts = [AgeingParts("gpu", 5, 5 * HOUR, 0.5), AgeingParts("psu", 3, 40 * HOUR, 2.0)]
    draws = [Fleet(parts, rest=1e-5).sampler(np.random.default_rng(3), 4) for _ in range(2)]
    whole, pieces = draws[0](300), np.concatenate([draws[1](n) for n in (1, 7, 128, 164)])
    assert (whole >= 0).all()
    assert np.allclose(whole, pieces)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (lambda: AgeingParts("gpu", 0, HOUR, 1.0), "number of parts"),
        (lambda: AgeingParts("gpu", 1, HOUR, 0.1), "Weibull shape of gpu"),
        (lambda: AgeingParts("gpu", 1, math.nan, 1.0), "mean time"),
        (lambda: Fleet([AgeingParts("gpu", 10**7, HOUR, 1.0)]).sampler(
            np.random.default_rng(0), 100), "too many to follow"),
    ],
)  # fmt: skip
def test_a_fleet_that_cannot_be_followed_is_refused(parts: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parts()  # type: ignore[operator]


JOBS = [
    SilentJob(1200.0, 60.0, 20.0, 1 / 86400, 300.0, 120.0),
    SilentJob(3000.0, 200.0, 0.0, 1 / 20000, 600.0, 0.0),
]


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("mtbf", [2 * HOUR, 1e7])
def test_verified_errors_cost_what_the_closed_form_says(job: SilentJob, mtbf: float) -> None:
    found = simulate_silent(job, Exponential(mtbf), runs=RUNS, failures=FAILURES, seed=11)
    closed = silent.outcome(job.interval, job.verify, job.save, job.rate, 1 / mtbf,
                            restart=job.restart, detect=job.detect)  # fmt: skip
    assert agreement(float(closed.useful), found).agrees
    assert found.unreached is None


@pytest.mark.parametrize("latency", [600.0, 7200.0])
@pytest.mark.parametrize("mtbf", [3 * HOUR, 1e7])
def test_errors_that_the_loss_shows_cost_what_the_closed_form_says(
    latency: float, mtbf: float
) -> None:
    job = SilentJob(1200.0, 60.0, 0.0, 1 / 40000, 300.0, 120.0, latency=latency, keep_last=3)
    found = simulate_silent(job, Exponential(mtbf), runs=RUNS, failures=FAILURES, seed=12)
    closed = latent.outcome(
        job.interval, job.save, job.rate, 1 / mtbf, latency, restart=300.0, detect=120.0
    )
    assert agreement(float(closed.useful), found).agrees
    for name in ("save", "lost", "detection", "restart"):
        assert float(getattr(found.outcome, name)) == pytest.approx(
            float(getattr(closed, name)), abs=0.02
        )
    # The bulk that an error strikes is behind it too: a little more than three periods.
    assert found.unreached == pytest.approx(silent.unrecoverable(3, 1260.0, latency), abs=0.12)


def test_without_errors_it_is_the_exact_model() -> None:
    ours = latent.outcome(900.0, 60.0, 0.0, 1 / 7200, 3600.0, restart=300.0, detect=60.0)
    plain = young_daly.outcome(900.0, 60.0, 7200.0, restart=300.0, detect=60.0)
    for name in ("useful", "save", "lost", "detection", "restart"):
        assert getattr(ours, name) == pytest.approx(getattr(plain, name), rel=1e-9, abs=1e-12)


def test_an_error_noticed_at_once_is_a_failure_without_detection() -> None:
    ours = latent.outcome(900.0, 0.0, 1 / 9000, 1e-12, 0.0, restart=300.0)
    plain = young_daly.outcome(900.0, 0.0, 9000.0, restart=300.0, safe_recovery=True)
    assert ours.useful == pytest.approx(plain.useful, rel=1e-6)


def test_the_best_interval_does_not_depend_on_how_late_errors_are_noticed() -> None:
    early, late = (
        latent.optimum(60.0, 1e-5, 1e-4, latency, restart=300.0) for latency in (60.0, 3600.0)
    )
    assert late == pytest.approx(early, rel=0.02)
    assert early == pytest.approx(math.sqrt(2 * 60 / 1.1e-4), rel=0.06)
