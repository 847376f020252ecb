"""Processes of a run: none is left behind, whenever a signal comes and whatever it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import NotFoundError
from ftckpt.replay.running import End, run
from ftckpt.replay.settings import Settings

# Starts a process in a session of its own, as torchrun does, and says its number.
NESTED = (
    "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time;"
    " time.sleep(600)'], start_new_session=True); print(child.pid, flush=True); time.sleep(600)"
)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int) -> bool:
    """Say whether a process ends; a killed one is there until its parent has seen it."""
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
def test_children_in_sessions_of_their_own_end_too(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    outcome = run([sys.executable, "-c", NESTED], Settings(log=str(tmp_path / "log")),
                  cwd=tmp_path, output=output, timeout=2)  # fmt: skip
    assert outcome.end is End.TIMED_OUT
    assert gone(int(output.read_text()))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
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


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="cannot run /nowhere/train"):
        run(["/nowhere/train"], Settings(), cwd=tmp_path, output=tmp_path / "o", timeout=5)
