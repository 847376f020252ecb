"""Preemptions with notice: the limits in which they are something simpler."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import UsageError
from ftckpt.planning.models import asynchronous, spot
from ftckpt.planning.models.spot import Preemption

TIME = st.floats(0.01, 3000)
RATE = st.floats(1e-9, 1e-2)


@given(TIME, TIME, st.floats(0, 500), st.floats(0, 1), TIME, RATE)
def test_without_preemptions_it_is_the_asynchronous_model(
    interval: float, snapshot: float, flush: float, slowdown: float, restart: float, rate: float
) -> None:
    ours = spot.outcome(interval, snapshot, rate, 0, flush=flush, slowdown=slowdown,
                        restart=restart, detect=30)  # fmt: skip
    theirs = asynchronous.outcome(interval, snapshot, 1 / rate, flush=flush, slowdown=slowdown,
                                  restart=restart, detect=30)  # fmt: skip
    for share in ("useful", "save", "detection", "restart", "waiting"):
        assert getattr(ours, share) == pytest.approx(getattr(theirs, share), rel=1e-9, abs=1e-15)
    assert ours.lost == pytest.approx(float(theirs.lost), abs=1e-12)


@given(TIME, TIME, st.floats(0, 500), st.floats(0, 1), RATE, RATE)
def test_every_second_has_one_account(
    interval: float, snapshot: float, flush: float, slowdown: float, fails: float, taken: float
) -> None:
    found = spot.outcome(
        interval, snapshot, fails, taken, flush=flush, slowdown=slowdown, restart=60, detect=30
    )
    parts = [found.useful, found.save, found.lost, found.detection, found.restart, found.waiting]
    assert math.fsum(float(part) for part in parts) == pytest.approx(1, rel=1e-12)
    assert all(float(part) >= -1e-12 for part in parts)


def test_announced_preemptions_lose_no_work() -> None:
    found = spot.outcome(600.0, 30.0, 0.0, 1 / 3600, restart=120, detect=60)
    assert found.lost == pytest.approx(0, abs=1e-12)
    # Each costs a save, detection and a restart (which others may interrupt).
    cycle = 3600 + 30 + (3600 + 60) * math.exp(120 / 3600) - 3600
    assert found.detection + found.restart == pytest.approx(1 - 3630 / cycle, rel=1e-9)
    assert spot.outcome(600.0, 30.0, 0.0, 0.0).useful == pytest.approx(600 / 630)


def test_notice_that_is_too_short_is_a_failure() -> None:
    def rates(notice: float, emergency: float, reliability: float = 1) -> tuple[float, float]:
        found = spot.classify(1e-5, Preemption(1e-4, notice, reliability), emergency)
        return float(found.unannounced), float(found.announced)

    assert rates(120, 120) == pytest.approx((1e-5, 1e-4))
    assert rates(120, 121) == pytest.approx((1.1e-4, 0))
    assert rates(120, 60, 0.9) == pytest.approx((2e-5, 9e-5))
    both = spot.classify(1e-5, Preemption(1e-4, 120), np.array([60.0, 180.0]))
    assert list(both.announced) == [pytest.approx(1e-4), 0]  # type: ignore[arg-type]


def test_preemptions_hardly_move_the_optimum() -> None:
    alone = asynchronous.optimum(20.0, 36000.0)
    best = spot.optimum(20.0, 1 / 36000, 1 / 3600, restart=120, detect=30)
    assert best == pytest.approx(alone, rel=0.25)
    goodput = spot.outcome(best, 20.0, 1 / 36000, 1 / 3600, restart=120, detect=30).useful
    for factor in (0.8, 1.25):
        other = spot.outcome(best * factor, 20.0, 1 / 36000, 1 / 3600, restart=120, detect=30)
        assert other.useful < goodput
    assert spot.optimum(20.0, 1 / 36000, 0.0) == pytest.approx(alone, rel=1e-6)
    assert spot.optimum(0.07, 1 / 1800, 1e-4, flush=28) == pytest.approx(28, rel=1e-6)


def test_notice_is_worth_having() -> None:
    with_notice = spot.outcome(600.0, 30.0, 1e-5, 1e-4, restart=300, detect=60).useful
    without = spot.outcome(600.0, 30.0, 1.1e-4, 0.0, restart=300, detect=60).useful
    assert with_notice > without + 0.02


def test_nothing_overflows_and_nonsense_is_refused() -> None:
    assert spot.outcome(1e6, 1.0, 1.0, 1.0, restart=1e6).useful == 0
    with pytest.raises(UsageError, match="unannounced interruptions must be above 0"):
        spot.optimum(1.0, 0.0, 1e-4)
    with pytest.raises(UsageError, match="reliability of notice must be at most 1"):
        Preemption(1e-4, 120, 1.5)
