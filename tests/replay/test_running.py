"""Processes of a run: none is left behind, whenever a signal comes and whatever it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import NotFoundError
from ftckpt.replay.processes import Settings
from ftckpt.replay.run.one_run import End, run

# Starts a process in a session of its own, as torchrun does, and says its number: soon.
NESTED = (
    "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-S', '-c',"
    " 'import time; time.sleep(600)'], start_new_session=True); print(child.pid, flush=True);"
    " time.sleep(600)"
)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    """Say whether a process ends; a killed one is there until its parent has seen it."""
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")

# Leaves parent, group and session, as a daemon does, and says its number.
DAEMON = (
    "import os, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        print(os.getpid(), flush=True)\n"
    "        time.sleep(600)\n"
    "    os._exit(0)\n"
    "os.wait()\n"
    "time.sleep(0.5)"
)


@needs_proc
def test_children_in_sessions_of_their_own_end_too(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    outcome = run([sys.executable, "-S", "-c", NESTED], Settings(log=str(tmp_path / "log")),
                  cwd=tmp_path, output=output, timeout=2)  # fmt: skip
    assert outcome.end is End.TIMED_OUT
    assert gone(int(output.read_text()))


@needs_proc
def test_a_daemon_ends_too(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    outcome = run([sys.executable, "-c", DAEMON], Settings(log=str(tmp_path / "log")),
                  cwd=tmp_path, output=output, timeout=30)  # fmt: skip
    assert (outcome.end, outcome.code) == (End.FINISHED, 0)
    assert gone(int(output.read_text()))


@needs_proc
def test_a_signal_while_the_process_starts_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    start = subprocess.Popen

    def started(*arguments: Any, **named: Any) -> Any:
        process = start(*arguments, **named)
        begun.append(process.pid)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # the signal's exception is raised before the caller has the process
        return process

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(KeyboardInterrupt):
        run([sys.executable, "-c", "import time; time.sleep(600)"],
            Settings(log=str(tmp_path / "log")), cwd=tmp_path, output=tmp_path / "output.txt",
            timeout=60)  # fmt: skip
    assert gone(begun[0])


@needs_proc
def test_a_signal_while_the_starting_thread_starts_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    start, start_thread = subprocess.Popen, threading.Thread.start

    def started(*arguments: Any, **named: Any) -> Any:
        process = start(*arguments, **named)
        begun.append(process.pid)
        return process

    def thread_started(self: threading.Thread) -> None:
        start_thread(self)
        time.sleep(0.3)  # what it was given, it does
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(threading.Thread, "start", thread_started)
    with pytest.raises(KeyboardInterrupt):
        run([sys.executable, "-c", "import time; time.sleep(600)"],
            Settings(log=str(tmp_path / "log")), cwd=tmp_path, output=tmp_path / "output.txt",
            timeout=60)  # fmt: skip
    assert all(gone(pid) for pid in begun)


@needs_proc
def test_a_signal_while_it_is_ended_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill, interrupts = os.killpg, iter([KeyboardInterrupt])

    def interrupted(group: int, number: int) -> None:
        for interrupt in interrupts:
            raise interrupt
        kill(group, number)

    monkeypatch.setattr(os, "killpg", interrupted)
    output = tmp_path / "output.txt"
    with pytest.raises(KeyboardInterrupt):
        run([sys.executable, "-S", "-c", NESTED], Settings(log=str(tmp_path / "log")), cwd=tmp_path,
            output=output, timeout=2)  # fmt: skip
    assert gone(int(output.read_text()))


def test_a_stop_that_is_only_half_said_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    says = (
        "import time; file = open('log/stopped', 'w'); time.sleep(0.5); file.write('3');"
        " file.close(); time.sleep(600)"
    )
    outcome = run([sys.executable, "-c", says], Settings(log=str(tmp_path / "log")), cwd=tmp_path,
                  output=tmp_path / "output.txt", timeout=60)  # fmt: skip
    assert (outcome.end, outcome.stopped_at) == (End.STOPPED, 3)


@needs_proc
def test_signals_that_we_ignore_are_not_ignored_for_the_training(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    outcome = run(["grep", "SigIgn", "/proc/self/status"], Settings(log=str(tmp_path / "log")),
                  cwd=tmp_path, output=output, timeout=60)  # fmt: skip
    assert outcome.end is End.FINISHED
    ignored = int(output.read_text().split()[1], 16)
    # What else is ignored is as it was for us: `nohup` wants it so.
    assert not any(ignored >> number - 1 & 1 for number in (signal.SIGPIPE, signal.SIGXFSZ))


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="cannot run /nowhere/train"):
        run(["/nowhere/train"], Settings(), cwd=tmp_path, output=tmp_path / "o", timeout=5)
