from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import UsageError
from ftckpt.planning import (
    Counted,
    IntervalRule,
    Latent,
    Model,
    Plain,
    Plan,
    PlanBounds,
    Question,
    Silent,
    Spot,
    Tiered,
    answer,
    around,
    combine,
    rates,
)
from ftckpt.planning.models import young_daly
from ftckpt.planning.models.spot import CopyTier, Preemption
from ftckpt.planning.simulation import Exponential, agreement
from ftckpt.planning.trial import simulated
from tests.campaign import examples

HOUR = 3600.0
TIERS = (CopyTier("ram", 1.0, 10.0, 0.8), CopyTier("shared", 60.0, 300.0, 1.0))


def planned(model: Model, **more: Any) -> Plan:
    failures = combine([rates.Cause("job", 1 / model.mtbf)])
    return answer(Question(model=model, failures=failures, **more))


def constraint(plan: Plan, name: str) -> tuple[bool, float, float]:
    found = next(c for c in plan.constraints if c.name == name)
    return found.ok, found.value, found.limit


def test_the_textbook_job() -> None:
    # 2,048 GPUs of 180 days, a save of 120 s: Young says 1,350 s and 17.78 %; exact is 16.74 %.
    plan = planned(Plain(mtbf=180 * 86400 / 2048, save=120.0))
    assert plan.interval.exact_s == pytest.approx(1271.2135753920345, rel=1e-9)
    assert plan.interval.young_s == pytest.approx(1350.0, rel=1e-12)
    assert plan.interval.daly_s == pytest.approx(1271.1851851851852, rel=1e-9)
    assert plan.outcome.waste == pytest.approx(0.16740261075121443, rel=1e-9)
    rules = {f.rule: f for f in plan.forecasts}
    assert 1 - rules[IntervalRule.YOUNG].predicted == pytest.approx(8 / 45, rel=1e-9)
    assert rules[IntervalRule.YOUNG].exact < rules[IntervalRule.EXACT].exact


def test_a_rule_gives_its_own_interval() -> None:
    job = Plain(mtbf=7593.75, save=120.0)
    for rule in (IntervalRule.YOUNG, IntervalRule.ETTR):
        assert planned(job, rule=rule).interval.chosen_s == pytest.approx(1350.0)
    assert planned(job, rule=IntervalRule.DALY).interval.chosen_s == pytest.approx(
        1271.185, rel=1e-6
    )


def test_the_prediction_is_for_the_interval_that_is_advised() -> None:
    job = Plain(mtbf=7593.75, save=120.0, restart=300.0, detect=60.0)
    # C/t + t/2M + (D + R)/M, and (1 - (R + D + t/2)/M) / (1 + C/t), as the page has them.
    by_hand: dict[IntervalRule, Callable[[float], float]] = {
        IntervalRule.YOUNG: lambda t: 1 - 120 / t - t / (2 * 7593.75) - 360 / 7593.75,
        IntervalRule.ETTR: lambda t: (1 - (360 + t / 2) / 7593.75) / (1 + 120 / t),
        IntervalRule.DALY: lambda t: float(job.outcome(t).useful),
        IntervalRule.EXACT: lambda t: float(job.outcome(t).useful),
    }
    for rule, predicted in by_hand.items():
        for interval in (300.0, 1350.0, 5400.0):
            plan = planned(job, rule=rule, interval=interval)
            assert plan.predicted == pytest.approx(predicted(interval), rel=1e-12)
        stepped = planned(job, rule=rule, step=777.0)
        assert stepped.predicted == pytest.approx(predicted(stepped.interval.chosen_s), rel=1e-12)
        free = planned(job, rule=rule)
        assert free.predicted == {f.rule: f for f in free.forecasts}[rule].predicted


def test_a_flush_sets_the_pace_where_it_is_longer_than_the_best_period() -> None:
    # A snapshot of 0.07 s and a flush of 28 s at a failure every 30 min.
    plan = planned(Plain(mtbf=1800.0, save=0.07, flush=28.0))
    assert plan.interval.chosen_s == pytest.approx(28.0)
    assert plan.outcome.useful == pytest.approx(0.9744717099931282, rel=1e-9)
    assert constraint(plan, "flush fits the period")[0]
    short = planned(Plain(mtbf=1800.0, save=0.07, flush=28.0), interval=15.9)
    assert not constraint(short, "flush fits the period")[0]
    assert short.outcome.waiting > 0


def test_bounds_of_loss_and_overhead_move_the_interval() -> None:
    # Lose at most 5 min, spend at most 1 %: a save of 3 s is just enough, and wastes 3.13 %.
    bounds = PlanBounds(max_loss=300.0, max_overhead=0.01)
    plan = planned(Plain(mtbf=1.953125 * HOUR, save=3.0), limits=bounds)
    assert plan.interval.chosen_s == pytest.approx(300.0)
    assert constraint(plan, "work at risk")[0]
    assert constraint(plan, "saving overhead")[0]
    first = young_daly.first_order(300.0, 3.0, 1.953125 * HOUR)
    assert first.waste == pytest.approx(0.0313, abs=5e-5)


def test_bounds_that_contradict_each_other_are_said_to() -> None:
    bounds = PlanBounds(max_loss=300.0, max_overhead=0.01)
    plan = planned(Plain(mtbf=1.953125 * HOUR, save=30.0), limits=bounds)
    assert constraint(plan, "work at risk")[0]
    assert constraint(plan, "saving overhead") == (False, 0.1, 0.01)
    advice = next(c.advice for c in plan.constraints if c.name == "saving overhead")
    assert "3 s" in advice


def test_whole_steps_stay_within_the_bounds() -> None:
    job = Plain(mtbf=2 * HOUR, save=3.0)
    plan = planned(job, step=7.0, limits=PlanBounds(max_loss=300.0, max_overhead=0.01))
    assert plan.interval.steps == 42
    assert plan.interval.chosen_s == 294.0
    assert planned(job, step=7.0).interval.steps is not None
    flushed = planned(Plain(mtbf=1800.0, save=0.07, flush=28.0), step=5.0)
    assert flushed.interval.chosen_s >= 28.0


def test_a_loss_that_the_flush_alone_exceeds_is_said_and_not_chased() -> None:
    job = Plain(mtbf=2 * HOUR, save=1.0, flush=60.0)
    plan = planned(job, step=7.0, limits=PlanBounds(max_loss=30.0))
    assert not constraint(plan, "work at risk")[0]
    assert plan.interval.chosen_s == pytest.approx(plan.interval.exact_s, rel=0.05)


def test_a_bad_interval_is_itself_what_to_improve_first() -> None:
    job = Plain(mtbf=3 * HOUR, save=60.0)
    plan, best = planned(job, interval=20 * HOUR), planned(job)
    assert plan.improvements[0].change == "the best interval"
    gain = float(best.outcome.useful) - float(plan.outcome.useful)
    assert plan.improvements[0].gain == pytest.approx(gain)
    others = {i.change: i.gain for i in plan.improvements[1:]}
    for improvement in best.improvements:
        if improvement.change != "the best interval":
            assert others[improvement.change] == pytest.approx(improvement.gain)


def test_ram_storage_and_notice_are_checked() -> None:
    bounds = PlanBounds(host_ram=100.0, staged=101.0, storage_bw=12.5)
    plan = planned(Plain(mtbf=HOUR, save=2.0, flush=8.0), limits=bounds, nbytes=100.0)
    assert constraint(plan, "host RAM") == (False, 101.0, 100.0)
    assert constraint(plan, "storage bandwidth") == (True, 12.5, 12.5)
    late = Spot(mtbf=HOUR, save=60.0, preemption=Preemption(1 / HOUR, 30.0))
    early = replace(late, preemption=Preemption(1 / HOUR, 60.0))
    assert constraint(planned(late), "save fits the notice")[0] is False
    assert constraint(planned(early), "save fits the notice")[0] is True
    assert planned(early).outcome.useful > planned(late).outcome.useful
    # Preemptions that are answered by a save do not shorten the interval that Young's rule gives.
    assert planned(early).interval.young_s == pytest.approx(young_daly.young(60.0, HOUR))


def test_what_is_kept_must_reach_back_to_a_good_copy() -> None:
    bounds = PlanBounds(keep_last=3, detection_latency=2 * HOUR)
    plan = planned(Plain(mtbf=3 * HOUR, save=60.0), limits=bounds)
    ok, value, needed = constraint(plan, "keep-last (at least)")
    period = plan.interval.chosen_s + 60.0
    assert (ok, value) == (False, 3)
    assert (
        math.exp(-needed * period / (2 * HOUR))
        <= 0.01
        < math.exp(-(needed - 1) * period / (2 * HOUR))
    )


def test_error_bars_reach_the_interval_and_the_goodput() -> None:
    failures = combine([], [Counted("counted", 419, 54 * 86400.0)])
    job = Plain(mtbf=failures.mtbf, save=60.0)
    plan = answer(Question(model=job, failures=failures))
    low, high = plan.interval.low_s, plan.interval.high_s
    assert low is not None
    assert high is not None
    assert low == pytest.approx(young_daly.optimum(60.0, 1 / failures.high))
    assert low < plan.interval.exact_s < high
    # The interval goes with the square root: +-10 % of the rate are +-5 % of it.
    assert high / low == pytest.approx(math.sqrt(failures.high / failures.low), rel=0.01)
    assert plan.goodput_limits is not None
    assert plan.goodput_limits[0] < plan.outcome.useful < plan.goodput_limits[1]


def test_upkeep_and_money() -> None:
    plan = planned(
        Plain(mtbf=3 * HOUR, save=60.0),
        interval=1140.0,
        nbytes=1e12,
        gpus=1000,
        run=50 * 86400.0,
        keep_every=10,
        milestones=5,
        gpu_hour=2.0,
        tb_month=20.0,
        limits=PlanBounds(keep_last=3),
    )
    assert plan.upkeep is not None
    assert (plan.upkeep.period_s, plan.upkeep.saves) == (1200.0, 3600)
    assert plan.upkeep.kept == 368
    assert plan.upkeep.bytes_per_day == pytest.approx(72e12)
    assert plan.upkeep.write_bytes_per_s == pytest.approx(1e12 / 60)
    assert plan.money is not None
    assert plan.money.gpu_per_day == pytest.approx(48_000.0)
    assert plan.money.run == pytest.approx(2_400_000.0)
    assert plan.money.run_waste == pytest.approx(2_400_000.0 * float(plan.outcome.waste))
    assert plan.money.storage_per_month == pytest.approx(368 * 20.0)


def test_without_prices_and_sizes_nothing_is_made_up() -> None:
    plan = planned(Plain(mtbf=3 * HOUR, save=60.0))
    assert (plan.upkeep, plan.money, plan.goodput_limits) == (None, None, None)
    assert plan.constraints == ()


JOBS = [
    Plain(mtbf=3 * HOUR, save=60.0, restart=300.0, detect=60.0),
    Plain(mtbf=3 * HOUR, save=2.0, flush=60.0, slowdown=0.02, restart=300.0, detect=60.0),
    Spot(mtbf=9 * HOUR, save=60.0, restart=300.0, preemption=Preemption(1 / HOUR, 120.0, 0.9)),
    Silent(mtbf=3 * HOUR, save=60.0, verify=20.0, silent_rate=1e-5, restart=300.0, detect=60.0),
    Latent(mtbf=3 * HOUR, save=60.0, silent_rate=1e-5, latency=7200.0, restart=300.0, detect=60.0),
    Tiered(mtbf=3 * HOUR, tiers=TIERS, detect=60.0),
]


@pytest.mark.parametrize("model", JOBS, ids=lambda model: type(model).__name__)
def test_every_model_is_best_at_its_optimum(model: Model) -> None:
    plan = planned(model)
    best = float(plan.outcome.useful)
    assert 0 < best < 1
    shares = ("useful", "save", "lost", "detection", "restart", "waiting")
    assert sum(float(getattr(plan.outcome, name)) for name in shares) == pytest.approx(1)
    for factor in (0.7, 0.95, 1.05, 1.4):
        if factor * plan.interval.exact_s >= model.least_interval:
            assert float(model.outcome(factor * plan.interval.exact_s).useful) < best
    gains = [improvement.gain for improvement in plan.improvements]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0
    assert min(gains) > -1e-9


@pytest.mark.parametrize("model", JOBS, ids=lambda model: type(model).__name__)
def test_every_model_agrees_with_its_simulation(model: Model) -> None:
    plan = planned(model)
    found = simulated(
        model, plan.interval.chosen_s, Exponential(float(model.mtbf)), runs=40, failures=100, seed=7
    )
    assert agreement(float(plan.outcome.useful), found).agrees


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Plain(mtbf=60.0, save=120.0), "a save stops training for 2 min"),
        (Plain(mtbf=60.0, save=1.0, flush=600.0), "durable only after 10 min"),
        (Plain(mtbf=60.0, save=1.0, restart=120.0), "a restart takes 2 min"),
        (Plain(mtbf=60.0, save=0.0), "costs nothing"),
        (Plain(mtbf=60.0, save=1.0, detect=1e9), "0.1 %"),
        (Plain(mtbf=60.0, save=math.nan), "save"),
        (Plain(mtbf=60.0, save=-1.0), "save"),
        (Tiered(mtbf=60.0, tiers=TIERS), "a restart takes 5 min"),
    ],
)
def test_a_job_that_cannot_progress_is_refused_in_a_sentence(model: Model, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned(model)


def test_rules_for_one_kind_of_save_know_no_tiers() -> None:
    with pytest.raises(UsageError, match="young"):
        planned(JOBS[5], rule=IntervalRule.YOUNG)


@settings(max_examples=examples(25, 200), deadline=None)
@given(st.floats(1e-4, 1.0), st.floats(60.0, 1e7), st.floats(0.1, 100.0))
def test_no_rule_beats_the_exact_interval(ratio: float, mtbf: float, step: float) -> None:
    plan = planned(Plain(mtbf=mtbf, save=ratio * mtbf), step=step)
    best = plan.forecasts[0].exact
    assert all(forecast.exact <= best + 1e-12 for forecast in plan.forecasts)
    assert float(plan.outcome.useful) <= best + 1e-12
    assert plan.interval.steps is not None
    assert plan.interval.steps >= 1
    assert plan.interval.chosen_s == pytest.approx(plan.interval.steps * step)


def test_intervals_around_one_respect_the_least() -> None:
    assert around(100.0, 60.0, (0.1, 0.5, 1.0, 2.0)) == [60.0, 100.0, 200.0]
