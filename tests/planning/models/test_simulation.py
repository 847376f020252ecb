"""The simulation: against a loop of single events, and against the closed forms."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import FtckptError, UsageError
from ftckpt.planning.models import asynchronous, spot, tiers, young_daly
from ftckpt.planning.models.spot import CopyTier, Costs, Pattern, Preemption
from ftckpt.planning.models.young_daly import Outcome
from ftckpt.planning.simulation import (
    Exponential,
    Law,
    Lognormal,
    Simulated,
    Trace,
    Weibull,
    agreement,
    complete,
    result,
    simulate,
    simulate_tiers,
)
from ftckpt.planning.simulation.jobs import Jobs, Recovery
from ftckpt.planning.simulation.timeline import ACCOUNTS, TimeLedger, of_costs, of_pattern
from tests.campaign import examples
from tests.planning.models.plain_loop import Account, background, blocking, tiered

TIERS = (CopyTier("ram", 0.5, 50, 0.78), CopyTier("disk", 5, 300, 0.9), CopyTier("far", 60, 900, 1))
PATTERN = Pattern(TIERS, 112.0, (8, 4))


def same(ledger: TimeLedger, account: Account) -> None:
    for name in ACCOUNTS:
        expected = pytest.approx(getattr(account, name), rel=1e-9, abs=1e-9 * account.wall)
        assert float(getattr(ledger, name)[0]) == expected, name
    assert float(ledger.wall[0]) == pytest.approx(account.wall, rel=1e-9)
    assert ledger.segments == account.segments


GAPS = st.lists(st.floats(0.5, 5000), min_size=1, max_size=30)


@settings(max_examples=examples(25, 240))
@given(st.floats(1, 1000), st.floats(0.1, 300), st.floats(0, 600), st.floats(0, 99), GAPS)
def test_blocking_saves_event_by_event(
    interval: float, save: float, restart: float, detect: float, gaps: list[float]
) -> None:
    costs = Costs(save, restart, detect)
    jobs = Jobs(of_costs(interval, costs), Recovery(detect, (restart,)), 1)
    for gap in gaps:
        jobs.fail(np.array([gap]), None)
    jobs.ledger.check()
    same(jobs.ledger, blocking(interval, costs, len(gaps), iter(gaps).__next__))


@settings(max_examples=examples(40, 400))
@given(
    st.floats(1, 1000), st.floats(0.1, 99), st.floats(0.1, 900), st.floats(0, 1),
    st.floats(0, 600), GAPS,
)  # fmt: skip
def test_background_flushes_event_by_event(
    interval: float, save: float, flush: float, slowdown: float, restart: float, gaps: list[float]
) -> None:
    costs = Costs(save, restart, 30, flush, slowdown)
    jobs = Jobs(of_costs(interval, costs), Recovery(30, (restart,)), 1)
    for gap in gaps:
        jobs.fail(np.array([gap]), None)
    jobs.ledger.check()
    account = background(interval, costs, len(gaps), iter(gaps).__next__)
    account.segments = jobs.ledger.segments  # counted to the newest durable save there
    same(jobs.ledger, account)


@settings(max_examples=examples(25, 240))
@given(
    st.floats(1, 1000), st.integers(1, 6), st.integers(1, 6),
    st.lists(st.tuples(st.floats(0.5, 50000), st.integers(0, 2)), min_size=1, max_size=30),
)  # fmt: skip
def test_tiers_event_by_event(
    interval: float, inner: int, outer: int, events: list[tuple[float, int]]
) -> None:
    pattern = Pattern(TIERS, interval, (inner, outer))
    jobs = Jobs(
        of_pattern(pattern),
        Recovery(60, tuple(t.restart for t in TIERS), (0.78, 0.12, 0.1), (1, inner, inner * outer)),
        1,
    )
    for gap, cause in events:
        jobs.fail(np.array([gap]), np.array([cause]))
    jobs.ledger.check()
    gaps, causes = iter(gap for gap, _ in events), iter(cause for _, cause in events)
    same(jobs.ledger, tiered(pattern, 60, len(events), gaps.__next__, causes.__next__))


def check(closed: Outcome, simulated: Simulated) -> None:
    """Demand agreement within four standard errors of at most 0.1 points, and in each account."""
    verdict = agreement(float(closed.useful), simulated)
    assert simulated.runs >= 20
    assert simulated.failures >= 20_000
    assert simulated.error <= 1e-3
    assert verdict.agrees, verdict.sentence
    assert "agree:" in verdict.sentence
    for name in ACCOUNTS:
        expected = pytest.approx(float(getattr(closed, name)), abs=6 * simulated.error + 1e-4)
        assert float(getattr(simulated.outcome, name)) == expected, name
    assert math.fsum(float(getattr(simulated.outcome, name)) for name in ACCOUNTS) == pytest.approx(
        1, rel=1e-9
    )


@dataclass(frozen=True)
class Size:
    """How much to simulate, with random numbers that no other test uses."""

    runs: int
    failures: int
    seed: int


@pytest.fixture
def size(request: pytest.FixtureRequest) -> Size:
    full = request.config.getoption("--campaign") == "full"
    return Size(400, 20_000 if full else 2000, zlib.crc32(request.node.nodeid.encode()))


@pytest.mark.parametrize("interval", [300.0, 900, 1271.2, 1350, 3600, 14400])
@pytest.mark.parametrize(("restart", "detect"), [(0.0, 0.0), (300, 60), (3000, 600)])
def test_blocking_saves_agree(interval: float, restart: float, detect: float, size: Size) -> None:
    found = simulate(
        interval,
        Costs(120, restart, detect),
        Exponential(7593.75),
        runs=size.runs,
        failures=size.failures,
        seed=size.seed,
    )
    check(young_daly.outcome(interval, 120, 7593.75, restart=restart, detect=detect), found)


@pytest.mark.parametrize(
    ("interval", "mtbf", "costs"),
    [
        (150.0, 7200.0, Costs(1.5625, 120, 30, 25)),
        (2000.0, 7200.0, Costs(10, 300, 60, 600)),
        (300.0, 3600.0, Costs(2, 120, 30, 200, 0.3)),
        (28.0, 1800.0, Costs(0.07, 60, 10, 28)),
        (15.9, 1800.0, Costs(0.07, 60, 10, 28)),  # waits for every flush
        (100.0, 3600.0, Costs(2, 120, 30, 200, 0.3)),
        (100.0, 3600.0, Costs(2, 120, 30, 200, 1.0)),
    ],
)
def test_background_flushes_agree(interval: float, mtbf: float, costs: Costs, size: Size) -> None:
    closed = asynchronous.outcome(
        interval, costs.save, mtbf, flush=costs.flush, slowdown=costs.slowdown,
        restart=costs.restart, detect=costs.detect,
    )  # fmt: skip
    check(
        closed,
        simulate(
            interval,
            costs,
            Exponential(mtbf),
            runs=size.runs,
            failures=size.failures,
            seed=size.seed,
        ),
    )


@pytest.mark.parametrize(
    ("pattern", "mtbf", "detect"),
    [
        (Pattern((CopyTier("far", 120, 300, 1),), 1350.0, ()), 7593.75, 60),
        (
            Pattern((CopyTier("near", 4, 10, 0.9), CopyTier("far", 90, 120, 1)), 313.0, (14,)),
            10800.0,
            0,
        ),
        (
            Pattern((CopyTier("near", 1, 5, 0.78), CopyTier("far", 60, 300, 1)), 163.0, (15,)),
            10800.0,
            60,
        ),
        (PATTERN, 1800.0, 60),
    ],
)
def test_tiers_agree(pattern: Pattern, mtbf: float, detect: float, size: Size) -> None:
    closed = tiers.outcome(pattern, mtbf, detect=detect)
    check(
        closed,
        simulate_tiers(
            pattern,
            Exponential(mtbf),
            detect=detect,
            runs=size.runs,
            failures=size.failures,
            seed=size.seed,
        ),
    )


@pytest.mark.parametrize(
    ("interval", "costs", "preemption"),
    [
        (1000.0, Costs(100, 300, 60), Preemption(1 / 3600, 120)),
        (1000.0, Costs(100, 300, 60), Preemption(1 / 3600, 120, 0.7)),
        (1000.0, Costs(100, 300, 60), Preemption(1 / 3600, 10)),
        (300.0, Costs(2, 120, 30, 200, 0.3), Preemption(1 / 3600, 300)),
        (100.0, Costs(2, 120, 30, 200, 0.3), Preemption(1 / 3600, 300, 0.7)),
    ],
)
def test_preemptions_agree(
    interval: float, costs: Costs, preemption: Preemption, size: Size
) -> None:
    rates = spot.classify(1 / 7200, preemption, costs.save + costs.flush)
    closed = spot.outcome(
        interval, costs.save, *rates, flush=costs.flush, slowdown=costs.slowdown,
        restart=costs.restart, detect=costs.detect,
    )  # fmt: skip
    found = simulate(
        interval,
        costs,
        Exponential(7200),
        preemption=preemption,
        runs=size.runs,
        failures=size.failures,
        seed=size.seed,
    )
    check(closed, found)


@pytest.mark.parametrize(
    ("law", "goodput"),
    [(Weibull(7593.75, 0.7), 0.803), (Weibull(7593.75, 0.5), 0.820),
     (Weibull(7593.75, 1.5), 0.788), (Lognormal(7593.75, 2.0), 0.826)],
)  # fmt: skip
def test_other_laws_of_the_same_mean(law: Law, goodput: float, size: Size) -> None:
    costs = Costs(120, 300, 60)
    found = simulate(1350, costs, law, runs=size.runs, failures=size.failures, seed=size.seed)
    assert found.mean == pytest.approx(goodput, abs=0.002 + 4 * found.error)
    assert law.name in found.outcome.model


@pytest.mark.parametrize(
    "law",
    [Exponential(100), Weibull(100, 0.7), Weibull(100, 3), Lognormal(100, 1), Trace([50, 150])],
)
def test_a_law_has_the_mean_that_it_says(law: Law) -> None:
    drawn = law.sampler(np.random.default_rng(5), 1000)(1000)
    assert drawn.shape == (1000, 1000)
    assert law.mean == pytest.approx(100)
    assert drawn.mean() == pytest.approx(100, rel=0.01)
    assert (drawn > 0).all()


def test_a_trace_is_replayed_in_its_order() -> None:
    gaps = [3.0, 1.0, 4.0, 1.5, 9.0]
    draw = Trace(gaps).sampler(np.random.default_rng(0), 7)
    drawn = np.concatenate([draw(3), draw(4), draw(3)])
    for run in drawn.T:
        start = gaps.index(run[0])
        assert list(run) == [gaps[(start + k) % 5] for k in range(10)]


def test_a_trace_without_chance_leaves_no_doubt() -> None:
    found = simulate(100, Costs(10), Trace([1000.0]), runs=3, failures=7)
    assert found.mean == pytest.approx(0.9)  # nine bulks of 110 s, and 10 s lost
    assert found.error == pytest.approx(0, abs=1e-12)
    assert agreement(0.9, found).agrees
    assert not agreement(0.91, found).agrees
    assert "disagree" in agreement(0.91, found).sentence


def test_the_same_seed_gives_the_same_runs() -> None:
    law, costs = Exponential(7200), Costs(60, 300)
    first, again, other = (simulate(900, costs, law, runs=5, seed=s) for s in (7, 7, 8))
    assert first == again
    assert first.mean != other.mean
    assert first.p10 < first.mean < first.p90


def test_a_job_without_failures_takes_its_work_and_its_saves() -> None:
    found = complete(1000.0, (300.0, Costs(20)), Trace([1e9]), runs=3)
    assert found.mean == 1060  # three saves; none after the last 100 s
    assert found.spread == 0
    exactly = complete(900.0, (300.0, Costs(20)), Trace([1e9]), runs=3)
    assert exactly.mean == 940
    flushed = complete(1000.0, (300.0, Costs(20, flush=400)), Trace([1e9]), runs=3)
    assert flushed.mean == 320 + 2 * 420 + 100


@pytest.mark.parametrize("plan", [(1350.0, Costs(120, 300, 60)), PATTERN])
def test_a_long_job_has_the_goodput_of_a_long_run(plan: tuple[float, Costs] | Pattern) -> None:
    found = complete(60 * 86400, plan, Exponential(7593.75), detect=60, runs=300, seed=3)
    if isinstance(plan, Pattern):
        closed = tiers.outcome(plan, 7593.75, detect=60)
    else:
        closed = young_daly.outcome(plan[0], 120, 7593.75, restart=300, detect=60)
    assert found.goodput == pytest.approx(float(closed.useful), abs=2e-3)
    assert found.p10 < found.p50 < found.p90
    assert found.mean == pytest.approx(60 * 86400 / found.goodput)


class Recording:
    """Counts, and remembers what it was told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None, str]] = []
        self.done = 0

    def start(self, label: str, total: int | None, unit: str = "B") -> None:
        self.stages.append((label, total, unit))

    def add(self, amount: int) -> None:
        self.done += amount


def test_the_counter_reaches_its_total() -> None:
    runs: list[tuple[Callable[[Recording], object], int, str]] = [
        (lambda c: simulate(900, Costs(9), Exponential(99), runs=3, failures=300, counter=c),
         900, "failures"),
        (lambda c: simulate(900, Costs(9), Exponential(99), preemption=Preemption(0.01, 30),
                            runs=3, failures=300, counter=c), 900, "failures"),
        (lambda c: simulate_tiers(PATTERN, Exponential(99), runs=3, failures=300, counter=c),
         900, "failures"),
        (lambda c: complete(5000, (900, Costs(9)), Exponential(9999), runs=3, counter=c),
         3, "runs"),
    ]  # fmt: skip
    for run, total, unit in runs:
        counter = Recording()
        run(counter)
        assert counter.stages == [("simulate", total, unit)]
        assert counter.done == total


def test_a_second_that_is_not_accounted_for_is_noticed() -> None:
    ledger = TimeLedger(2)
    ledger.wall += 100.0
    ledger.useful += [100.0, 99.999]
    with pytest.raises(FtckptError, match=r"cannot account for 0\.001 s"):
        ledger.check()


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda: simulate(0, Costs(1), Exponential(9)), "the interval must be above 0"),
        (lambda: simulate(1, Costs(1), Exponential(9), runs=1), "runs must be at least 2"),
        (lambda: simulate(1, Costs(1), Exponential(9), failures=0), "failures must be at least 1"),
        (lambda: Costs(math.nan), "save cost must be a number"),
        (lambda: Exponential(0), "between failures must be above 0"),
        (lambda: Weibull(9, 0), "Weibull shape must be at least 0.05"),
        (lambda: Lognormal(9, -1), "sigma of the lognormal must be above 0"),
        (lambda: Trace([]), "the trace holds no failure"),
        (lambda: Trace([3, 0]), "a time in the trace must be above 0"),
        (lambda: simulate_tiers(Pattern(TIERS, 9, (1.5, 2)), Exponential(9)), "1.5 saves between"),
        (lambda: simulate_tiers(Pattern(TIERS, 9, (2000, 2000)), Exponential(9)), "than 1,000,000"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_in_a_sentence(run: Callable[[], object], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace(".", r"\.")):
        run()


def test_a_job_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result, "MOST_FAILURES", 1000)
    with pytest.raises(UsageError, match="not done after 1,000 failures"):
        complete(1e6, (1e6, Costs(9)), Exponential(9), runs=2)
