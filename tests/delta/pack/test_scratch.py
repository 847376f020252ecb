"""Lent memory is nobody else's until it is back."""

from __future__ import annotations

import threading

import pytest

from ftckpt.delta.pack.scratch import lender


def test_what_is_lent_is_lent_once() -> None:
    with lender() as lend:
        one, two = lend(100), lend(50)
        one[:], two[:] = bytes([1]) * 100, bytes([2]) * 50
        with lender() as inner:
            three = inner(100)
            three[:] = bytes([3]) * 100
        assert (set(one), set(two)) == ({1}, {2})
        with lender() as again:
            assert again(100).obj is three.obj  # it is back, and lent to the next
        assert (set(one), set(two)) == ({1}, {2})


def test_it_comes_back_from_what_fails_and_grows() -> None:
    held = []

    def fail() -> None:
        with lender() as lend:
            held.append(lend(10).obj)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with lender() as lend:
        assert lend(10).obj is held[0]
    with lender() as lend:
        assert len(lend(1000)) == 1000


def test_threads_share_nothing() -> None:
    held = []

    def take() -> None:
        with lender() as lend:
            held.append(lend(10))
            barrier.wait()

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held[0].obj is not held[1].obj
