"""Tiers: against a Markov chain solved at full length, and against the model with one tier."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import UsageError
from ftckpt.planning.models import tiers, young_daly
from ftckpt.planning.models.spot import CopyTier, Pattern, shares
from tests.campaign import examples

NEAR, FAR = CopyTier("near", 4, 10, 0.9), CopyTier("far", 90, 120, 1)


def chain_goodput(pattern: Pattern, mtbf: float, detect: float) -> float:
    """Return the goodput by one linear equation for every save and every restart of the pattern.

    Unknowns are the mean times to the end of the pattern: after each save, and while each save is
    being restarted from each tier.
    """
    counts = [int(count) for count in pattern.counts]
    levels = len(pattern.tiers)
    total = math.prod(counts)
    spans = [math.prod(counts[:level]) for level in range(levels)]
    chances = shares(pattern.tiers)
    rate = 1 / mtbf
    size = total * (1 + levels)
    matrix, right = np.eye(size), np.zeros(size)

    def restarting(save: int, level: int) -> int:
        return total + (save - save % spans[level]) * levels + level

    for save in range(total):
        ended = [n for n, span in enumerate(spans) if (save + 1) % span == 0]
        cost = sum(pattern.tiers[n].cost for n in ended)
        alive = math.exp(-rate * (float(pattern.interval) + cost))
        right[save] = (1 - alive) / rate
        if save + 1 < total:
            matrix[save, save + 1] -= alive
        for level, chance in enumerate(chances):
            matrix[save, restarting(save, level)] -= (1 - alive) * chance
        for level in range(levels):
            row = total + save * levels + level
            alive = math.exp(-rate * pattern.tiers[level].restart)
            right[row] = detect + (1 - alive) / rate
            matrix[row, save - save % spans[level]] -= alive
            for cause, chance in enumerate(chances):
                matrix[row, restarting(save, max(level, cause))] -= (1 - alive) * chance
    return float(pattern.interval) * total / float(np.linalg.solve(matrix, right)[0])


@settings(max_examples=examples(25, 240))
@given(
    st.lists(
        st.tuples(st.floats(0, 200), st.floats(0, 900), st.floats(0.01, 1), st.integers(1, 5)),
        min_size=1,
        max_size=3,
    ),
    st.floats(10, 2000),
    st.floats(600, 1e6),
    st.floats(0, 600),
)
def test_elimination_is_the_solution_of_all_equations(
    parts: list[tuple[float, float, float, int]], interval: float, mtbf: float, detect: float
) -> None:
    weight = sum(part[2] for part in parts)
    covers = np.cumsum([part[2] / weight for part in parts])
    covers[-1] = 1
    chosen = tuple(
        CopyTier(f"tier {n}", cost, restart, float(min(1, cover)))
        for n, ((cost, restart, _, _), cover) in enumerate(zip(parts, covers, strict=True))
    )
    pattern = Pattern(chosen, interval, tuple(part[3] for part in parts[:-1]))
    found = tiers.outcome(pattern, mtbf, detect=detect)
    assert found.useful == pytest.approx(chain_goodput(pattern, mtbf, detect), rel=1e-8)


@given(st.floats(1, 1e4), st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e3))
def test_one_tier_is_the_model_with_one_tier(
    interval: float, save: float, restart: float, detect: float
) -> None:
    plain = young_daly.outcome(interval, save, 7200.0, restart=restart, detect=detect)
    alone = tiers.outcome(
        Pattern((CopyTier("far", save, restart, 1),), interval, ()), 7200.0, detect=detect
    )
    unused = tiers.outcome(
        Pattern((CopyTier("near", 0, 50, 1e-30), CopyTier("far", save, restart, 1)), interval,
                (1,)),
        7200.0, detect=detect,
    )  # fmt: skip
    for share in ("useful", "save", "detection", "restart"):
        assert getattr(alone, share) == pytest.approx(getattr(plain, share), rel=1e-9)
        assert getattr(unused, share) == pytest.approx(getattr(plain, share), rel=1e-9)
    assert alone.lost == pytest.approx(float(plain.lost), abs=1e-12)


def test_goodput_lies_between_the_two_first_order_estimates() -> None:
    for near, far in (
        ((4, 10, 0.9), (90, 120)),
        ((1, 5, 0.78), (60, 300)),
        ((0.5, 5, 0.9), (300, 0)),
    ):
        pair = (CopyTier("near", *near), CopyTier("far", *far, 1))
        overhead = tiers.first_order(pair, 10800).overhead
        free = tuple(CopyTier(t.name, t.cost, 0, t.covers) for t in pair)
        best = tiers.outcome(tiers.optimum(free, 10800), 10800).useful
        assert 1 - overhead < best < 1 / (1 + overhead)


def test_a_near_tier_pays() -> None:
    pattern = tiers.optimum((NEAR, FAR), 10800.0)
    both = tiers.outcome(pattern, 10800.0).useful
    alone = young_daly.outcome(young_daly.optimum(90.0, 10800.0), 90.0, 10800.0, restart=120).useful
    assert alone == pytest.approx(0.867, abs=1e-3)
    assert both == pytest.approx(0.9328, abs=5e-5)
    assert pattern.counts == (14,)
    assert pattern.gap(0) == pattern.interval
    assert pattern.gap(1) == pattern.interval * 14


def test_no_neighbour_of_the_optimum_is_better() -> None:
    three = (
        CopyTier("ram", 0.5, 5, 0.78),
        CopyTier("disk", 5, 30, 0.9),
        CopyTier("far", 60, 300, 1),
    )
    best = tiers.optimum(three, 10800.0, detect=60)
    assert best.tiers == three
    goodput = tiers.outcome(best, 10800.0, detect=60).useful
    inner, outer = best.counts
    for counts in ((inner - 1, outer), (inner + 1, outer), (inner, outer - 1), (inner, outer + 1)):
        for factor in (0.8, 0.9, 1, 1.1, 1.25):
            other = Pattern(three, best.interval * factor, counts)
            assert tiers.outcome(other, 10800.0, detect=60).useful <= goodput
    for factor in (0.98, 1.02):
        other = Pattern(three, best.interval * factor, best.counts)
        assert tiers.outcome(other, 10800.0, detect=60).useful < goodput


def test_a_tier_that_costs_more_than_it_saves_is_left_out() -> None:
    useless = CopyTier("disk", 80, 100, 0.905)
    assert tiers.select((NEAR, useless, FAR), 10800.0) == (NEAR, FAR)
    assert tiers.optimum((NEAR, useless, FAR), 10800.0).tiers == (NEAR, FAR)


def test_nothing_stands_behind_a_tier_that_cures_everything() -> None:
    sure = CopyTier("far", 90, 120, 1)
    assert tiers.select((NEAR, sure, CopyTier("tape", 900, 9000, 1)), 10800.0) == (NEAR, sure)
    assert tiers.optimum((NEAR, sure, CopyTier("tape", 900, 9000, 1)), 10800.0).tiers == (
        NEAR,
        sure,
    )


def test_a_tier_that_cures_nothing_more_is_left_out() -> None:
    same = CopyTier("disk", 5, 30, 0.9)
    assert tiers.optimum((NEAR, same, FAR), 10800.0).tiers == (NEAR, FAR)


@settings(max_examples=examples(20, 160))
@given(
    st.floats(0, 100), st.floats(0.1, 900), st.floats(0.01, 0.999999), st.floats(100, 1e8),
    st.floats(0, 600),
)  # fmt: skip
def test_the_optimum_is_at_least_as_good_as_first_order(
    near: float, far: float, covers: float, mtbf: float, restart: float
) -> None:
    pair = (CopyTier("near", near, restart / 10, covers), CopyTier("far", far, restart, 1))
    best = tiers.optimum(pair, mtbf)
    goodput = float(tiers.outcome(best, mtbf).useful)
    alone = young_daly.outcome(young_daly.optimum(far, mtbf), far, mtbf, restart=restart)
    if len(best.tiers) == 1:
        assert goodput == pytest.approx(float(alone.useful), rel=1e-8)
    else:
        gaps = tiers.first_order(pair, mtbf).gaps
        count = max(1, min(round(gaps[1] / max(gaps[0], 1e-9)), 10000))
        rough = tiers.outcome(Pattern(pair, gaps[1] / count, (count,)), mtbf)
        assert goodput >= float(rough.useful) * (1 - 1e-9)


def test_very_many_saves_cost_nothing_to_compute() -> None:
    pattern = Pattern((NEAR, FAR), 300.0, (10**9,))
    assert 0 <= tiers.outcome(pattern, 10800.0).useful < 1e-3
    small = tiers.outcome(Pattern((NEAR, FAR), np.array([300.0, 100.0]), (14,)), 10800.0).useful
    assert isinstance(small, np.ndarray)
    assert small[0] == pytest.approx(
        float(tiers.outcome(Pattern((NEAR, FAR), 300.0, (14,)), 10800.0).useful), rel=1e-12
    )


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ((), "no tier to save to"),
        ((NEAR,), "no tier cures every failure"),
        ((FAR, NEAR), "no tier cures every failure"),
        ((CopyTier("a", 1, 1, 0.9), CopyTier("b", 1, 1, 0.5), FAR), "less than the tier before it"),
        ((NEAR, CopyTier("far", 0, 1, 1)), "save cost of tier far must be above 0"),
    ],
)
def test_tiers_that_make_no_sense(chosen: tuple[CopyTier, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tiers.optimum(chosen, 10800.0)
