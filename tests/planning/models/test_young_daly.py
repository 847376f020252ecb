"""The textbook rules: what their authors printed, and where they end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ftckpt.planning.models import young_daly
from ftckpt.planning.rates import DAY, HOUR, from_daily


def crossing(waste: Callable[[float], float], level: float) -> float:
    """Return from which mean time between failures on, in minutes, waste is below a level."""
    low, high = 60.0, 1e6
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if waste(middle) > level else (low, middle)
    return low / 60


def test_three_conventions_of_waste_cross_a_fifth_at_three_places() -> None:
    def first_order(mtbf: float) -> float:
        return float(young_daly.first_order(young_daly.young(90, mtbf), 90, mtbf).waste)

    def per_period(mtbf: float) -> float:
        return float(young_daly.per_period(young_daly.young(90, mtbf), 90, mtbf))

    def true(mtbf: float) -> float:
        return float(young_daly.outcome(young_daly.optimum(90, mtbf), 90, mtbf).waste)

    assert crossing(first_order, 0.2) == pytest.approx(75.0, abs=0.05)
    assert crossing(per_period, 0.2) == pytest.approx(68.0, abs=0.05)
    assert crossing(true, 0.2) == pytest.approx(64.8, abs=0.05)


def test_daly_ends_where_a_save_takes_twice_the_time_between_failures() -> None:
    assert young_daly.daly(2.0, 1.0) == 1
    assert young_daly.daly(5.0, 1.0) == 1
    assert young_daly.daly(2.0 - 1e-9, 1.0) == pytest.approx(2 * (1 + 1 / 3 + 1 / 9) - 2)


def test_effective_training_time_ratio_of_16384_gpus() -> None:
    mtbf = 1 / from_daily(6.50e-3, 16384 / 8)
    found = young_daly.ettr(30 * 60, 60, mtbf, restart=5 * 60)
    assert found.useful == pytest.approx(0.789, abs=5e-4)
    assert young_daly.outcome(30 * 60, 60, mtbf, restart=5 * 60).useful == pytest.approx(
        0.798, abs=5e-4
    )
    assert found.useful + found.save + found.lost + found.restart == pytest.approx(1)


def test_bloom_lost_little_by_saving_seldom() -> None:
    # 40 s every 3 h: 0.37 % in saves, as published.
    found = young_daly.first_order(3 * HOUR, 40, 5 * DAY)
    assert found.save == pytest.approx(0.0037, abs=5e-5)


def test_first_order_names_what_it_adds_up() -> None:
    found = young_daly.first_order(900.0, 120.0, 7593.75, restart=300, detect=60)
    assert found.restart == pytest.approx(300 / 7593.75)
    assert found.detection == pytest.approx(60 / 7593.75)
    assert found.waste == pytest.approx(0.1925925925925926 + 360 / 7593.75)
    assert "first order" in found.model
