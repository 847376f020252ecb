"""Background flushes: identities, back-pressure, and values that a simulation has confirmed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import UsageError
from ftckpt.planning.models import asynchronous, young_daly

TIME = st.floats(0.01, 5000)
SHARE = st.floats(0, 1)


@given(TIME, TIME, TIME, TIME)
def test_without_a_flush_it_is_the_blocking_model(
    interval: float, snapshot: float, restart: float, detect: float
) -> None:
    ours = asynchronous.outcome(interval, snapshot, 3600.0, restart=restart, detect=detect)
    theirs = young_daly.outcome(interval, snapshot, 3600.0, restart=restart, detect=detect)
    for share in ("useful", "save", "detection", "restart"):
        assert getattr(ours, share) == pytest.approx(getattr(theirs, share), rel=1e-12)
    assert ours.waiting == 0


@given(TIME, TIME, TIME, SHARE)
def test_every_second_has_one_account(
    interval: float, snapshot: float, flush: float, slowdown: float
) -> None:
    found = asynchronous.outcome(
        interval, snapshot, 3600.0, flush=flush, slowdown=slowdown, restart=60, detect=30
    )
    parts = [found.useful, found.save, found.lost, found.detection, found.restart, found.waiting]
    assert math.fsum(float(part) for part in parts) == pytest.approx(1, rel=1e-12)
    assert all(float(part) >= -1e-12 for part in parts)


def test_the_flush_does_not_move_the_optimum() -> None:
    for flush in (0.0, 25.0, 90.0):
        period = asynchronous.optimum(4.0, 10800.0, flush=flush) + 4
        assert period == pytest.approx(295.278, abs=5e-4)


@given(st.floats(0.1, 100), st.floats(0, 2000), SHARE)
def test_no_other_interval_is_better(snapshot: float, flush: float, slowdown: float) -> None:
    costs = {"flush": flush, "slowdown": slowdown}
    best = asynchronous.optimum(snapshot, 3600.0, **costs)
    goodput = asynchronous.outcome(best, snapshot, 3600.0, **costs).useful
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2):
        other = asynchronous.outcome(best * factor, snapshot, 3600.0, **costs).useful
        assert other <= goodput * (1 + 1e-12)


def test_a_flush_longer_than_the_interval_sets_the_pace() -> None:
    # 70 ms of snapshot would be saved every 15.9 s, but the flush takes 28.
    assert young_daly.optimum(0.07, 1800.0) == pytest.approx(15.8, abs=0.1)
    assert asynchronous.optimum(0.07, 1800.0, flush=28) == 28
    hurried = asynchronous.outcome(15.9, 0.07, 1800.0, flush=28)
    assert hurried.waiting > 0.4
    assert asynchronous.outcome(28.0, 0.07, 1800.0, flush=28).waiting == 0


def test_a_flush_that_stops_all_work_costs_like_a_blocking_save() -> None:
    found = asynchronous.outcome(100.0, 1.0, 1e9, flush=50, slowdown=1)
    assert found.useful == pytest.approx(100 / 151, rel=1e-6)
    assert found.waiting == 0
    assert asynchronous.least_interval(50, 1) == 0


@pytest.mark.parametrize(
    ("interval", "costs", "mtbf", "simulated", "first_order_off"),
    [
        (150.0, (1.5625, 25, 0, 30, 120), 7200.0, 0.95580, 0.001),
        (2000.0, (10, 600, 0, 60, 300), 7200.0, 0.75494, 0.033),
        (300.0, (2, 200, 0.3, 30, 120), 3600.0, 0.72682, None),
    ],
)
def test_values_confirmed_by_simulation(
    interval: float,
    costs: tuple[float, float, float, float, float],
    mtbf: float,
    simulated: float,
    first_order_off: float | None,
) -> None:
    snapshot, flush, slowdown, detect, restart = costs
    more = {"flush": flush, "slowdown": slowdown, "detect": detect, "restart": restart}
    found = asynchronous.outcome(interval, snapshot, mtbf, **more).useful
    assert found == pytest.approx(simulated, abs=2e-5)
    if first_order_off is not None:
        rough = asynchronous.first_order(interval, snapshot, mtbf, **more).useful
        assert abs(rough - found) == pytest.approx(first_order_off, abs=5e-4)


def test_ignoring_the_flush_overstates_goodput() -> None:
    counted = asynchronous.outcome(150.0, 1.5625, 7200.0, flush=25).useful
    ignored = asynchronous.outcome(150.0, 1.5625, 7200.0).useful
    assert ignored == pytest.approx(0.9793, abs=5e-5)
    assert ignored / counted == pytest.approx(math.exp(25 / 7200), rel=1e-12)


def test_first_order_refuses_an_interval_without_room_for_the_flush() -> None:
    with pytest.raises(UsageError, match="minus the work during a flush must be at least 0 s"):
        asynchronous.first_order(10.0, 1.0, 3600.0, flush=20)
    with pytest.raises(UsageError, match=r"the slowdown must be at most 1, but is 1\.5"):
        asynchronous.optimum(1.0, 3600.0, slowdown=1.5)
