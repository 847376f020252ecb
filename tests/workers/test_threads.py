"""The engine: everything is done, lazily, a bounded number at a time, and it ends at once."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest

from ftckpt.errors import NoResourceError
from ftckpt.workers.threads import DaemonThreads, in_turn, run


def square(number: int) -> int:
    return number * number


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_every_task_is_done_once(jobs: int) -> None:
    assert sorted(run(range(100), square, jobs=jobs)) == [n * n for n in range(100)]


def test_no_task_no_thread() -> None:
    before = threading.active_count()
    assert list(run([], square, jobs=8)) == []
    assert threading.active_count() == before


def test_jobs_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=30)
    assert sorted(run(range(3), lambda n: barrier.wait(), jobs=3)) == [0, 1, 2]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_where_no_more_threads_can_be_started_fewer_do_it(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    started: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if len(started) == most:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    done = run(range(100), square, jobs=8)
    if most:
        assert sorted(done) == [n * n for n in range(100)]
    else:
        with pytest.raises(NoResourceError):
            list(done)
    assert len(started) == most


def test_no_more_than_jobs_run_at_the_same_time() -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def work(number: int) -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        for _ in range(1000):
            pass
        with lock:
            running[0] -= 1

    list(run(range(200), work, jobs=2))
    assert 1 <= most[0] <= 2


def test_tasks_are_taken_only_as_fast_as_work_is_done() -> None:
    taken = itertools.count()
    results = run(taken, square, jobs=2, window=5)
    for _ in range(10):
        next(results)
    # ten done, five in flight, one in the hand
    assert next(taken) <= 16
    results.close()  # type: ignore[attr-defined]


def test_the_first_failure_is_raised_and_the_rest_is_not_begun() -> None:
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 3:
            raise ValueError("task 3")
        return number

    with pytest.raises(ValueError, match="task 3"):
        list(run(itertools.count(), work, jobs=1, window=4))
    assert begun[-1] <= 3 + 4


@pytest.mark.parametrize(
    ("width", "order"), [(1, "aaabccdd"), (2, "abaacdcd"), (3, "abacadcd"), (9, "abcdacda")]
)
def test_lists_are_taken_in_turn(width: int, order: str) -> None:
    assert "".join(in_turn(["aaa", "b", "", "cc", "dd"], width)) == order


def test_a_list_is_begun_when_one_before_it_has_ended() -> None:
    begun: list[str] = []

    def tasks(name: str) -> Iterator[str]:
        begun.append(name)
        yield from (name, name)

    turns = in_turn(map(tasks, "abcd"), 2)
    assert [next(turns) for _ in range(4)] == ["a", "b", "a", "b"]
    assert begun == ["a", "b"]
    assert next(turns) == "c"


def test_a_failing_task_list_is_raised() -> None:
    def tasks() -> Iterator[int]:
        yield 1
        raise OSError("listing")

    with pytest.raises(OSError, match="listing"):
        list(run(tasks(), square, jobs=2))


def test_closing_cancels_what_waits() -> None:
    hold = threading.Event()
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number:
            hold.wait(30)
        return number

    results = run(range(50), work, jobs=1, window=10)
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    hold.set()
    assert max(begun) <= 2


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, DaemonThreads])
def test_an_executor_that_was_passed_in_stays_open(kind: type[Executor]) -> None:
    with kind(2) as pool:  # type: ignore[call-arg]
        assert sorted(run(range(10), square, jobs=9, executor=pool)) == [n * n for n in range(10)]
        assert pool.submit(square, 3).result() == 9


def test_a_shut_down_executor_takes_nothing() -> None:
    pool = DaemonThreads(1)
    pool.shutdown()
    with pytest.raises(RuntimeError):
        pool.submit(square, 1)


SLEEPER = """
import sys, time
from ftckpt.workers.threads import run
def work(n):
    if n == 0:
        return n
    sys.stdout.write("busy\\n")  # one write: two threads say it
    sys.stdout.flush()
    time.sleep(600)
try:
    for _ in run(range(9), work, jobs=2):
        pass
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_an_interrupt_does_not_wait_for_the_threads() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, env=dict(os.environ)
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"busy\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130  # the work would take ten minutes
        finally:
            process.kill()
