"""The exact model: identities that hold for every input, and what others have computed."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import UsageError
from ftckpt.planning.models import young_daly

MTBF = st.floats(1, 1e8)
RATIO = st.floats(1e-9, 50)  # C/M
SHARE = st.floats(0, 2)  # of M, for restart and detection


def reference_share(ratio: float) -> Decimal:
    """Return the root of -log(1-x) - x = ratio to 50 digits."""
    with localcontext() as context:
        context.prec = 60
        c = Decimal(ratio)
        q = (2 * c).sqrt()
        x = q - q * q / 3 + q**3 / 36 if c < Decimal("0.3") else Decimal(1)
        g = -(c + x)
        for _ in range(80):
            g += (g - (g.exp() - 1) + c) / (g.exp() - 1)
        return 1 - g.exp()


@given(st.one_of(RATIO, st.floats(1e-16, 1e-2)))
def test_the_optimum_is_exact_to_1e_13(ratio: float) -> None:
    assert float(young_daly.optimal_share(ratio)) == pytest.approx(
        float(reference_share(ratio)), rel=1e-13
    )


@given(MTBF, RATIO)
def test_least_waste_is_the_share_of_the_interval(mtbf: float, ratio: float) -> None:
    interval = young_daly.optimum(ratio * mtbf, mtbf)
    waste = young_daly.outcome(interval, ratio * mtbf, mtbf).waste
    assert waste == pytest.approx(interval / mtbf, rel=1e-9)


@given(MTBF, st.floats(1e-6, 3), SHARE, SHARE)
def test_the_slope_at_the_optimum_is_zero(
    mtbf: float, ratio: float, restart: float, detect: float
) -> None:
    save = ratio * mtbf
    best = young_daly.optimum(save, mtbf)

    def goodput(factor: float) -> float:
        return float(
            young_daly.outcome(
                best * factor, save, mtbf, restart=restart * mtbf, detect=detect * mtbf
            ).useful
        )

    here, left, right = goodput(1), goodput(0.999), goodput(1.001)
    assert here > left
    assert here > right
    # A parabola's slope is what differs between the two sides; its curvature is what they share.
    assert abs(left - right) < 0.01 * (2 * here - left - right) + 1e-15


@given(MTBF, RATIO, SHARE, SHARE, st.floats(0.01, 10), st.floats(1e-3, 1e3))
def test_scaling_all_times_changes_nothing(
    mtbf: float, ratio: float, restart: float, detect: float, interval: float, factor: float
) -> None:
    def goodput(scale: float) -> float:
        unit = mtbf * scale
        return float(
            young_daly.outcome(
                interval * unit, ratio * unit, unit, restart=restart * unit, detect=detect * unit
            ).useful
        )

    assert goodput(factor) == pytest.approx(goodput(1), rel=1e-9)


@given(MTBF, RATIO, SHARE, SHARE, st.floats(0.01, 10), st.sampled_from("CRDM"))
def test_goodput_falls_with_every_cost_and_rises_with_mtbf(
    mtbf: float, ratio: float, restart: float, detect: float, interval: float, which: str
) -> None:
    values = {"C": ratio * mtbf, "R": restart * mtbf, "D": detect * mtbf, "M": mtbf}

    def goodput() -> float:
        return float(
            young_daly.outcome(
                interval * mtbf, values["C"], values["M"],
                restart=values["R"], detect=values["D"],
            ).useful
        )  # fmt: skip

    before = goodput()
    values[which] *= 1.1 if which != "M" else 1 / 1.1
    assert goodput() <= before


@given(st.floats(1e-3, 1e6), RATIO, SHARE, SHARE, st.booleans())
def test_every_second_has_one_account(
    interval: float, ratio: float, restart: float, detect: float, safe: bool
) -> None:
    found = young_daly.outcome(
        interval, ratio, 1.0, restart=restart, detect=detect, safe_recovery=safe
    )
    parts = [found.useful, found.save, found.lost, found.detection, found.restart]
    assert math.fsum(float(part) for part in parts) == pytest.approx(1, rel=1e-12)
    assert all(float(part) >= -1e-15 for part in parts)


@pytest.mark.parametrize("length", [1.0, 700.0, 710.0, 1e4, 1e6, 1e25])
def test_nothing_overflows(length: float) -> None:
    for model in (
        young_daly.outcome(length, 1.0, 1.0, restart=length, detect=1.0),
        young_daly.outcome(np.array([length]), 1.0, 1.0, restart=length, detect=1.0),
    ):
        useful = float(np.asarray(model.useful).item())
        assert 0 <= useful < 1
        assert (useful > 0) == (length < 300)


def test_nothing_fails() -> None:
    found = young_daly.outcome(100.0, 10.0, math.inf)
    assert found.useful == pytest.approx(10 / 11)
    assert found.lost == pytest.approx(0, abs=1e-15)
    assert young_daly.optimum(10.0, math.inf) == math.inf
    assert young_daly.optimum(0.0, math.inf) == 0
    assert young_daly.optimum(0.0, 100.0) == 0


def test_arrays_give_what_numbers_give() -> None:
    save = np.geomspace(1e-6, 1e6, 200)
    intervals = young_daly.optimum(save, 3600.0)
    goodput = young_daly.outcome(intervals, save, 3600.0, restart=30.0).useful
    assert isinstance(intervals, np.ndarray)
    assert isinstance(goodput, np.ndarray)
    for cost, interval, useful in zip(save, intervals, goodput, strict=True):
        assert young_daly.optimum(float(cost), 3600.0) == pytest.approx(interval, rel=1e-14)
        single = young_daly.outcome(float(interval), float(cost), 3600.0, restart=30.0).useful
        assert single == pytest.approx(useful, rel=1e-12)


def test_a_safe_recovery_follows_its_own_formula() -> None:
    found = young_daly.outcome(1350.0, 120.0, 7593.75, restart=300, detect=60, safe_recovery=True)
    wall = (7593.75 + 60 + 300) * math.expm1(1470 / 7593.75)
    assert found.useful == pytest.approx(1350 / wall, rel=1e-12)


def test_the_page_of_two_thousand_gpus() -> None:
    # The transcription of the slides, eta M - C, would be C/2 below the optimum.
    assert young_daly.optimum(120.0, 7593.75) == pytest.approx(1271.2, abs=0.05)
    simulated = young_daly.outcome(1350.0, 120.0, 7593.75, restart=300, detect=60).useful
    assert simulated == pytest.approx(0.79383, abs=5e-6)


@pytest.mark.parametrize(
    ("ratio", "young", "daly", "lost"),
    # Errors of the intervals in per cent, and the goodput that Young's costs in points.
    [
        (1e-4, 0.47, 0, 0),
        (1e-3, 1.51, 0, 0),
        (0.01, 4.88, -0.001, 0.013),
        (0.05, 11.4, -0.013, 0.12),
        (0.1, 16.7, -0.04, 0.29),
        (0.5, 43, -0.55, 1.45),
        (1, 68, -1.8, 1.97),
    ],
)
def test_how_far_the_classic_rules_are_off(
    ratio: float, young: float, daly: float, lost: float
) -> None:
    best = young_daly.optimum(ratio, 1.0)
    assert 100 * (young_daly.young(ratio, 1.0) / best - 1) == pytest.approx(young, rel=0.01)
    assert 100 * (young_daly.daly(ratio, 1.0) / best - 1) == pytest.approx(daly, abs=6e-4, rel=0.03)
    goodput = [
        young_daly.outcome(t, ratio, 1.0).useful for t in (best, young_daly.young(ratio, 1.0))
    ]
    assert 100 * (goodput[0] - goodput[1]) == pytest.approx(lost, abs=0.006)


def test_a_value_out_of_range_is_named() -> None:
    with pytest.raises(UsageError, match=r"the save cost must be at least 0 s, but is -3 s"):
        young_daly.optimum(-3.0, 100.0)
    with pytest.raises(UsageError, match=r"the save cost must be a number, but is not a number"):
        young_daly.optimum(math.nan, 100.0)
    with pytest.raises(UsageError, match=r"between failures must be above 0 s, but is 0 s"):
        young_daly.optimum(np.ones(3), np.array([1.0, 0.0, -1.0]))
    with pytest.raises(UsageError, match=r"the interval must be finite, but is inf s"):
        young_daly.outcome(math.inf, 1.0, 1.0)
