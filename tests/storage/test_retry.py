"""Pauses between attempts: bounded each, bounded in all, never in step."""

from __future__ import annotations

from ftckpt.storage.retry import Backoff


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pauses(seconds: float) -> list[float]:
    clock = Clock()
    backoff = Backoff(seconds, clock=clock)
    result = []
    while (wait := backoff.pause()) is not None:
        result.append(wait)
        clock.now += wait
    assert backoff.attempts == len(result) + 1
    return result


def test_total_is_bounded() -> None:
    for _ in range(50):
        waits = pauses(30)
        assert sum(waits) <= 30
        assert 6 <= len(waits) <= 18


def test_pauses_grow_to_a_bound() -> None:
    waits = pauses(60)
    assert waits[0] <= 0.2
    assert 2.5 <= max(waits) <= 5
    assert waits[3] > waits[0]


def test_no_time_is_no_second_attempt() -> None:
    assert pauses(0) == []


def test_slow_attempts_count() -> None:
    clock = Clock()
    backoff = Backoff(30, clock=clock)
    assert backoff.pause() is not None
    clock.now += 31
    assert backoff.pause() is None


def test_jitter() -> None:
    assert len({pauses(1)[0] for _ in range(20)}) > 10
