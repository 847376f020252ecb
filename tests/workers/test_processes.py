"""Copies of this process: they do the same as threads, fail as loudly, and never stay behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftckpt.progress import NULL, Counter
from ftckpt.workers import budget, processes
from ftckpt.workers import threads as engine

# A process of its own, because that of the tests has threads.
HEAD = """
import os, signal, sys, threading, time
from ftckpt.workers import processes, threads as engine
from ftckpt import errors
from ftckpt.progress import NULL

class Count:
    def __init__(self): self.sum = 0
    def start(self, *what): raise AssertionError
    def add(self, amount): self.sum += amount

def stream(work):
    def made(tasks, counter, jobs):
        def one(task):
            counter.add(10)
            return work(task)
        return engine.run(tasks, one, jobs=jobs)
    return made

def run(tasks, work, n=3, counter=NULL):
    return processes.run_in_processes(tasks, stream(work), jobs=n, processes=n, counter=counter)
"""


def outcome(body: str) -> str:
    """Return what a script prints after `HEAD`."""
    script = HEAD + textwrap.dedent(body)
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0, found.stderr
    assert not found.stderr
    return found.stdout.strip()


def are_gone(*numbers: int) -> bool:
    until = time.monotonic() + 60
    while any(Path(f"/proc/{number}/stat").exists() for number in numbers):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_every_task_is_done_once_by_several_processes_and_counted() -> None:
    assert (
        outcome("""
        count = Count()
        def work(task):
            time.sleep(0.01)
            return task, os.getpid()
        made = list(run((n for n in range(40)), work, counter=count))
        assert sorted(n for n, _ in made) == list(range(40)), made
        who = {number for _, number in made}
        assert len(who) == 3 and os.getpid() not in who
        assert count.sum == 400
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("none left")
    """)
        == "none left"
    )


def test_libraries_are_loaded_once_for_all_copies() -> None:
    body = """
        names = ["numpy", "xxhash", "zstandard"]
        assert not set(names) & set(sys.modules)
        print(all(all(made) for made in run(
            range(6), lambda task: [name in sys.modules for name in names]
        )), set(names) <= set(sys.modules))
    """
    assert outcome(body) == "True True"


def test_an_executor_has_the_tasks_and_there_are_no_copies() -> None:
    assert (
        outcome("""
        made = processes.run_in_processes(
            range(4), stream(lambda task: os.getpid()), jobs=1, processes=3, executor=object()
        )
        print(set(made) == {os.getpid()})
    """)
        == "True"
    )


def test_more_processes_than_tasks_and_no_tasks_at_all() -> None:
    assert outcome("print(sorted(run([7, 8], str, n=6)), list(run([], str)))") == "['7', '8'] []"


def test_an_error_comes_back_as_it_was() -> None:
    assert (
        outcome("""
        def work(task):
            if task == 5:
                more = {"hint": "mend it", "kind": "bad-digest", "file": "f", "offset": 9}
                raise errors.CorruptError("bad", **more)
            return task
        try:
            list(run(range(20), work))
        except errors.CorruptError as error:
            print(error, error.hint, error.kind, error.file, error.offset, error.exit_code)
            print("in work" in "".join(error.__notes__))  # for --debug
    """)
        == "bad mend it bad-digest f 9 4\nTrue"
    )


@pytest.mark.parametrize(
    ("raised", "caught"),
    [
        ("KeyError(task)", "KeyError True"),
        ("type('Local', (Exception,), {})('what')", "RuntimeError True"),  # no pickle has it
        ("SystemExit(3)", "RuntimeError True"),
    ],
)
def test_an_error_says_where_it_was(raised: str, caught: str) -> None:
    assert (
        outcome(f"""
        def work(task):
            raise {raised}
        try:
            list(run(range(4), work))
        except Exception as error:
            said = str(error) + "".join(getattr(error, "__notes__", []))
            print(type(error).__name__, "Traceback" in said and "in work" in said)
    """)
        == caught
    )


def test_a_result_that_cannot_be_sent_is_an_error() -> None:
    assert (
        outcome("""
        try:
            list(run(range(4), lambda task: threading.Lock()))
        except TypeError as error:
            print("pickle" in str(error))
    """)
        == "True"
    )


@pytest.mark.parametrize(
    ("number", "raised"), [("SIGKILL", "NoResourceError 12"), ("SIGSEGV", "RuntimeError ?")]
)
def test_a_copy_that_is_killed_is_told(number: str, raised: str) -> None:
    assert (
        outcome(f"""
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        def work(task):
            if task == 3:
                os.kill(os.getpid(), signal.{number})
            return task
        try:
            list(run(range(20), work))
        except Exception as error:
            print(type(error).__name__, int(getattr(error, "exit_code", 0)) or "?")
    """)
        == raised
    )


def test_a_killed_copy_is_told_where_the_system_buries_it() -> None:
    assert (
        outcome("""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        print(len(list(run(range(20), str))))
        try:
            list(run(range(20), lambda task: os.kill(os.getpid(), signal.SIGKILL)))
        except errors.NoResourceError:
            print("killed")
    """)
        == "20\nkilled"
    )


def test_a_copy_without_memory_to_say_so_is_told() -> None:
    assert (
        outcome("""
        from ftckpt.workers import processes as forked
        def none(error):
            raise MemoryError
        forked._portable = none
        try:
            list(run(range(20), lambda task: [0] * (1 << 60)))
        except errors.NoResourceError as error:
            print(error.exit_code)
    """)
        == "12"
    )


def test_an_interruption_while_copies_are_made_leaves_none() -> None:
    assert (
        outcome("""
        real, made = os.fork, []
        def interrupted():
            made.append(real())
            if made[-1]:
                os.kill(os.getpid(), signal.SIGINT)
            return made[-1]
        os.fork = interrupted
        try:
            list(run(range(9), lambda task: time.sleep(60)))
        except KeyboardInterrupt:
            pass
        print(len(made), [os.path.exists(f"/proc/{number}") for number in made])
    """)
        == "3 [False, False, False]"
    )


def test_copies_that_do_not_die_are_waited_for_together() -> None:
    assert (
        outcome("""
        class Clock:
            now = 0.0
            monotonic = lambda self: self.now
            def sleep(self, seconds): self.now += seconds
        def work(task):
            if task:
                time.sleep(60)
        made = run(range(9), work)
        next(made)
        processes.time, processes.os.waitpid = Clock(), lambda *what: (0, 0)
        made.close()
        print(0 < processes.time.now < 1.1)
    """)
        == "True"
    )


def test_who_stops_asking_leaves_nothing_behind() -> None:
    assert (
        outcome("""
        def work(task):
            if task:
                time.sleep(60)
            return os.getpid()
        made = run(range(9), work)
        next(made)
        begin = time.monotonic()
        made.close()
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print(time.monotonic() - begin < 30)
    """)
        == "True"
    )


def test_copies_die_with_the_first_process() -> None:
    script = HEAD + textwrap.dedent("""
        def work(task):
            os.write(1, b"%d\\n" % os.getpid())  # in one piece
            time.sleep(60)
        list(run(range(9), work))
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        copies = [int(process.stdout.readline()) for _ in range(3)]
        process.kill()
    assert are_gone(*copies)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_group_is_the_first_processs_matter(number: int) -> None:
    script = HEAD + textwrap.dedent("""
        class Stopped(BaseException): pass
        def stop(number, frame): raise Stopped
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        def work(task):
            os.write(1, b"%d\\n" % os.getpid())  # in one piece
            time.sleep(60)
        try:
            list(run(range(9), work))
        except Stopped:
            print("stopped")
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        copies = [int(process.stdout.readline()) for _ in range(3)]
        os.killpg(process.pid, number)
        assert process.stdout.read() == "stopped\n"
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert are_gone(*copies)


def test_where_the_system_makes_no_more_fewer_do_it_or_threads() -> None:
    assert (
        outcome("""
        real, left = os.fork, 1
        def refusing():
            global left
            left -= 1
            if left < 0:
                raise BlockingIOError(11, "no more processes")
            return real()
        os.fork = refusing
        work = lambda task: os.getpid()
        one = set(run(range(9), work))
        own = set(run(range(9), work))
        print(len(one), one != {os.getpid()}, own == {os.getpid()})
    """)
        == "1 True True"
    )


def test_a_copy_has_its_share_of_the_memory() -> None:
    assert (
        outcome("""
        from ftckpt.workers import budget
        budget.set_budget(9 << 30)
        work = lambda task: (budget.budget() >> 30, budget.share() >> 30)
        print(set(run(range(9), work)), budget.share() >> 30)
    """)
        == "{(9, 3)} 9"
    )


def test_there_are_as_many_as_there_is_memory_for_when_they_are_made() -> None:
    assert (
        outcome("""
        real, made = os.fork, []
        os.fork = lambda: made.append(real()) or made[-1]
        for has in (40, 200, 400, 600):
            made.clear()
            from ftckpt.workers import budget
            processes.held = budget.held = lambda **options: has << 20
            list(run(range(20), str, n=8))
            print(len(made), end=" ")
    """)
        == "8 8 3 0"
    )


def test_there_are_no_more_than_tasks() -> None:
    assert (
        outcome("""
        real, made = os.fork, []
        os.fork = lambda: made.append(real()) or made[-1]
        print(sorted(run([7, 8], str, n=6)), len(made))
    """)
        == "['7', '8'] 2"
    )


def test_other_threads_and_torch_forbid_it() -> None:
    assert (
        outcome("""
        import types
        safe = [processes.are_safe()]
        sys.modules["torch"] = types.ModuleType("torch")
        safe.append(processes.are_safe())
        del sys.modules["torch"]
        other = threading.Thread(target=time.sleep, args=(60,), daemon=True)
        other.start()
        safe.append(processes.are_safe())
        print(safe, set(run(range(9), lambda task: os.getpid())) == {os.getpid()}, flush=True)
        os._exit(0)
    """)
        == "[True, False, False] True"
    )


def test_what_ran_before_has_ended_in_time() -> None:
    assert (
        outcome("""
        for _ in engine.run(range(99), str, jobs=8):
            pass
        print(processes.are_safe())
    """)
        == "True"
    )


def test_without_copies_threads_do_the_same() -> None:
    def stream(tasks: Iterator[int], counter: Counter, jobs: int) -> Iterator[tuple[int, int]]:
        assert counter is NULL
        return engine.run(tasks, lambda task: (task, threading.get_ident()), jobs=jobs)

    for copies in (0, 1):
        made = dict(processes.run_in_processes(range(9), stream, jobs=1, processes=copies))
        assert sorted(made) == list(range(9))


def test_as_many_copies_as_do_more_than_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20

    def count(wanted: int, room: int, **options: Any) -> int:
        monkeypatch.setattr(budget, "_budget", budget.held() + room * mib)
        return budget.process_count(wanted, 8 * mib, **options)

    monkeypatch.setattr(budget, "held", lambda *, mapped=False: 48 * mib)
    assert count(2, 64) == 2
    assert count(2, 63) == 0  # one copy is no gain
    assert count(64, 1024) == 32
    assert count(64, 1024, reserved=128 * mib) == 28
    assert count(64, 128) == 0  # four are less than 16 threads
    assert count(1, 1024) == 0
    assert count(64, 1024, decoding=True) == (1072 // 2 - 48) // 32
    monkeypatch.setattr(budget, "held", lambda *, mapped=False: 240 * mib)  # of many tensors
    assert count(64, 1024) == 8


def test_a_task_that_is_most_of_all_is_left_to_threads() -> None:
    assert processes.pays(60, 100, jobs=2)  # two threads do no more than one and a half
    assert not processes.pays(70, 100, jobs=2)
    assert not processes.pays(60, 100, jobs=64)
    assert processes.pays(20, 100, jobs=64)
    assert processes.pays(100, 100, jobs=1)
