"""What stands around the interval: steps, storage, compression, elasticity, peers, risk."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import UsageError
from ftckpt.planning import risk
from ftckpt.planning.models import arithmetic, storage, tiers, young_daly
from tests.campaign import examples


def goodput(interval: float) -> float:
    return float(young_daly.outcome(interval, 60.0, 7200.0).useful)


@given(st.floats(0.05, 1e7))
def test_rounding_moves_little_and_says_what_it_costs(steps: float) -> None:
    found = arithmetic.to_steps(steps * 1.7, 1.7, goodput)
    assert found.exact == pytest.approx(steps)
    assert found.interval == pytest.approx(found.steps * 1.7)
    assert abs(found.steps - steps) <= max(0.05 * steps, 1)
    assert found.goodput_lost == goodput(steps * 1.7) - goodput(found.interval)
    digits = str(found.steps).rstrip("0")
    assert len(digits) <= 3
    assert found.steps < 100 or digits[-1] == "5" or len(digits) <= 2


@pytest.mark.parametrize(
    ("steps", "rounded"), [(0.2, 1), (7.4, 7), (47.3, 48), (747.8, 750), (1314.5, 1300)]
)
def test_rounded_steps(steps: float, rounded: int) -> None:
    assert arithmetic.to_steps(steps, 1.0, goodput).steps == rounded


def test_rounding_never_goes_below_the_flush() -> None:
    assert arithmetic.to_steps(702.0, 1.0, goodput).steps == 700
    assert arithmetic.to_steps(702.0, 1.0, goodput, least=702.0).steps == 750
    assert arithmetic.to_steps(700.0, 1.0, goodput, least=700.0).steps == 700


def test_kept_is_never_more_than_was_saved() -> None:
    assert storage.kept(3520, 3, 10) == 355
    assert storage.kept(2, 3, 10, milestones=4) == 2
    assert storage.kept(100, 3) == 3
    assert storage.kept(101, 0, 10) == 11
    with pytest.raises(UsageError, match="cannot be negative"):
        storage.kept(5, -1)


def test_the_slower_side_sets_the_bandwidth() -> None:
    assert storage.bandwidth(2048, 5e9) == 10.24e12
    assert storage.bandwidth(2048, 5e9, ceiling=80e9) == 80e9
    save = storage.transfer_seconds(storage.state_bytes(671e9, 14), 80e9)
    assert save == pytest.approx(117.4, abs=0.05)


def test_a_terabyte_month_costs_its_price() -> None:
    assert storage.storage_cost(2e12, 23.0, 365 * 86400) == pytest.approx(2 * 23 * 12)
    assert storage.gpu_hours(1024, 47 * 60) == pytest.approx(802.13, abs=0.01)
    assert storage.staging_bytes(14e12, 8000, buffers=2) == 3.5e9


@given(st.floats(0.1, 20), st.floats(1e8, 1e11), st.floats(1e8, 1e11))
def test_break_even_is_where_both_take_the_same(
    ratio: float, codec: float, bandwidth: float
) -> None:
    found = storage.compare(1e12, ratio, codec, bandwidth)
    for way in ("sequential", "pipelined"):
        below = float(getattr(found, f"{way}_below"))
        if abs(bandwidth - below) > 1e-6 * bandwidth:
            assert (getattr(found, way) < found.plain) == (bandwidth < below)
        if ratio > 1.001:
            even = storage.compare(1e12, ratio, codec, below)
            assert getattr(even, way) == pytest.approx(float(even.plain), rel=1e-9)


def test_the_page_that_stops_at_the_balance() -> None:
    # It says that compression wins below 1.6 GB/s; at 3 GB/s it still does, pipelined.
    found = storage.compare(100e9, 2.5, 4e9, 3e9)
    assert found.balance == 1.6e9
    assert found.pipelined_below == 4e9
    assert found.sequential_below == pytest.approx(2.4e9)
    assert found.pipelined == pytest.approx(25)
    assert found.plain == pytest.approx(33.3, abs=0.05)


def test_going_on_with_three_quarters() -> None:
    found = {option.name: option for option in arithmetic.options(64, 48, 2048, 1e-3)}
    assert {name: (o.per_gpu, o.accumulation, o.batch) for name, o in found.items()} == {
        "same-per-gpu": (32, 1, 1536),
        "batch-up": (43, 1, 2064),
        "batch-down": (42, 1, 2016),
        "accumulate": (21, 2, 2016),
        "accumulate-nearest": (1, 43, 2064),
        "accumulate-full": (32, 2, 3072),
    }
    assert found["same-per-gpu"].lr_linear == pytest.approx(0.00075)
    assert found["same-per-gpu"].lr_sqrt == pytest.approx(1e-3 * math.sqrt(0.75))
    assert found["same-per-gpu"].steps == pytest.approx(4 / 3)
    assert found["batch-up"].memory == pytest.approx(43 / 32)
    assert found["accumulate"].step_time == pytest.approx(42 / 32)


@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 32),
    st.integers(1, 4),
    st.floats(1e-6, 1),
)
def test_options_say_what_they_do(
    before: int, after: int, per_gpu: int, passes: int, lr: float
) -> None:
    batch = before * per_gpu * passes
    found = arithmetic.options(before, after, batch, lr, passes)
    assert found[0].name == "same-per-gpu"
    assert len({(o.per_gpu, o.accumulation) for o in found}) == len(found)
    for option in found:
        assert option.batch == option.per_gpu * option.accumulation * after
        assert option.lr_linear / lr == pytest.approx(option.batch / batch)
        assert option.lr_sqrt**2 / lr**2 == pytest.approx(option.batch / batch)
        assert option.steps * option.batch == pytest.approx(batch)
        assert option.batch_change == pytest.approx(option.batch / batch - 1)
        nearly = abs(option.batch - batch) * 20 <= batch
        said = arithmetic.percent_change(option.batch_change)
        assert ("batch" in option.keeps) == nearly
        assert (f"nearly ({said})" in option.keeps) == (nearly and option.batch != batch)
        assert (f"batch, learning rate, steps ({said})" in option.changes) == (not nearly)


@settings(max_examples=examples(20, 120))
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9), st.integers(1, 4))
def test_no_other_numbers_keep_the_batch_better(
    before: int, after: int, per_gpu: int, passes: int
) -> None:
    batch = before * per_gpu * passes
    ways = arithmetic.options(before, after, batch, 1.0, passes)
    by_numbers = {(o.per_gpu, o.accumulation): o for o in ways}
    # All there is without more memory; more passes than samples only take the batch further away.
    every = [(abs(each * count * after - batch), count, each)
             for each in range(1, per_gpu + 1) for count in range(1, batch + 2)]  # fmt: skip
    least = min(every)
    assert (least[2], least[1]) in by_numbers
    near = [(count, off, each) for off, count, each in every if off * 20 <= batch]
    few = min(near, default=(least[1], least[0], least[2]))
    assert (few[2], few[0]) in by_numbers
    for way in ways:
        off = abs(way.batch - batch)
        if way.name == "accumulate":
            assert (way.accumulation, off, way.per_gpu) == few
        if way.name == "accumulate-nearest":
            assert (off, way.accumulation, way.per_gpu) == least
        if way.name == "accumulate-full":
            others = (abs(count * after * per_gpu - batch) for count in range(1, batch + 2)
                      if count != passes)  # fmt: skip
            assert off == min(others)
        if way.name.startswith("batch-"):
            assert off < after * passes


def test_fewer_gpus_than_divide_the_batch() -> None:
    found = {option.name: option for option in arithmetic.options(8, 6, 64, 1e-3, 4)}
    assert {name: (o.per_gpu, o.accumulation, o.batch) for name, o in found.items()} == {
        "same-per-gpu": (2, 4, 48),
        "batch-up": (3, 4, 72),
        "accumulate": (1, 11, 66),
        "accumulate-full": (2, 5, 60),
    }
    keeps = found["accumulate"].keeps
    assert keeps == "batch, learning rate, steps, nearly (+3.12 %); no more memory"
    assert found["batch-up"].keeps == "passes"
    assert "steps (+12.5 %)" in found["batch-up"].changes


@pytest.mark.parametrize(
    ("change", "said"),
    [(0.0, "0 %"), (0.125, "+12.5 %"), (-0.0625, "-6.25 %"), (12.5, "+1,250 %"),
     (1 / 128, "+0.78 %"), (1e-6, "+0.0001 %")],
)  # fmt: skip
def test_changes_are_said_as_they_are(change: float, said: str) -> None:
    assert arithmetic.percent_change(change) == said


def test_whether_to_wait_for_a_spare() -> None:
    assert arithmetic.shrink_above(300, 128, 8) == pytest.approx(640)
    with pytest.raises(UsageError, match="128 of 128 GPUs lost"):
        arithmetic.shrink_above(300, 128, 128)
    with pytest.raises(UsageError, match="a batch of 2048 does not divide among 60 GPUs"):
        arithmetic.options(60, 48, 2048, 1e-3)


@pytest.mark.parametrize(("machines", "copies"), [(6, 1), (6, 2), (6, 3), (8, 2), (4, 4)])
def test_survival_counts_every_way_to_lose_machines(machines: int, copies: int) -> None:
    for lost in range(machines + 1):
        ways = list(itertools.combinations(range(machines), lost))
        good = sum(
            not any(
                all(m in way for m in range(start, start + copies))
                for start in range(0, machines, copies)
            )
            for way in map(set, ways)
        )
        assert tiers.survival(machines, copies, lost) == pytest.approx(good / len(ways))


def test_groups_that_do_not_come_out_are_refused() -> None:
    with pytest.raises(UsageError, match="127 machines cannot form groups of 2"):
        tiers.survival(127, 2, 1)
    with pytest.raises(UsageError, match="9 of 8 machines cannot be lost"):
        tiers.survival(8, 2, 9)


def test_without_checkpoints_a_long_run_never_ends() -> None:
    # lambda T = 450 at one failure in 1.6 h.
    hours = risk.log10_completion(450 * 1.6 * 3600, 1.6 * 3600) - math.log10(3600)
    assert hours == pytest.approx(195.64, abs=5e-3)
    assert risk.log10_completion(1e9, 1.0) == pytest.approx(1e9 / math.log(10))
    short = 10 ** risk.log10_completion(100.0, 1e6, restart=30, detect=20)
    assert short == pytest.approx(100, rel=1e-3)


@given(st.floats(1, 1e5), st.floats(1, 1e5), st.floats(0, 1e4), st.floats(0, 1e4))
def test_completion_is_one_endless_bulk(
    work: float, mtbf: float, restart: float, detect: float
) -> None:
    found = young_daly.outcome(work, 0.0, mtbf, restart=restart, detect=detect).useful
    expected = 10 ** -(
        risk.log10_completion(work, mtbf, restart=restart, detect=detect) - math.log10(work)
    )
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-300)


def test_probabilities_for_many_machines() -> None:
    rate = np.array([0.0, 1e-12, 1.0])
    assert list(np.asarray(risk.probability(rate, 10.0))) == pytest.approx([0, 1e-11, 1], rel=1e-4)
    assert risk.probability_of_trials(0.0, 1e6) == 0
    with pytest.raises(UsageError, match="the chance of failure must be at most 1"):
        risk.probability_of_trials(1.5, 3)
