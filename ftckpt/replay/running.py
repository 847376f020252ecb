"""One run of the user's command: a fresh process tree, recorded, ended when it has shown enough.

The run ends in one of four ways: by itself, where it was to be stopped (as a failure would stop it:
killed, without a chance to save), because it has recorded all that it was to record, or because its
time is over. All of its output is kept in a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ftckpt.errors import NotFoundError

from .settings import PREFIX, Settings, done_marker, stopped_marker

# Pinned where the user has not set them, the same for every run; reported with the answer.
PINNED: dict[str, str] = {
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONUNBUFFERED": "1",
}
_POLL = 0.05
# The end of the output that a sentence about a failure quotes.
_TAIL = 4096


class End(StrEnum):
    """How a run ended."""

    FINISHED = "finished by itself"
    RECORDED = "recorded all that was asked for"
    STOPPED = "stopped where it was to be"
    CRASHED = "crashed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run went.

    Attributes:
        end: how it ended.
        code: exit code of the command; None where it was ended from outside.
        seconds: how long it ran.
        stopped_at: the step after which it was stopped, where it was.
        last_words: the last line that it printed.
    """

    end: End
    code: int | None
    seconds: float
    stopped_at: int | None = None
    last_words: str = ""


def environment(settings: Settings, own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a recorded run: the user's, pinned, with the recorder in it."""
    kept = {name: value for name, value in own.items() if not name.startswith(PREFIX)}
    path = [str(Path(__file__).parent / "inject"), own.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return PINNED | kept | settings.environment()


def run(
    command: Sequence[str], settings: Settings, *, cwd: Path, output: Path, timeout: float
) -> Outcome:
    """Run a command to the end that `settings` asks for, and leave no process of it behind.

    Args:
        command: program and arguments.
        settings: what is recorded; its `log` names the directory.
        cwd: where it runs.
        output: file that receives what it prints, both streams.
        timeout: seconds after which it is ended.

    Raises:
        NotFoundError: the program is not there.
    """
    start = time.monotonic()
    with output.open("wb") as sink, ThreadPoolExecutor(1) as starter:
        # In a thread of its own: a signal that comes while the process starts is raised here, and
        # must not lose the process.
        started = starter.submit(
            subprocess.Popen,
            command,
            cwd=cwd,
            env=environment(settings),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process = started.result()
            end = _wait(process, Path(settings.log), start + timeout)
        except OSError as error:
            if started.exception() is not error:
                raise
            raise NotFoundError(f"cannot run {command[0]}: {error.strerror}") from error
        finally:
            if started.exception() is None:
                _end_tree(started.result())
    code = process.returncode if end in (End.FINISHED, End.CRASHED) else None
    marker = stopped_marker(Path(settings.log))
    stopped_at = int(marker.read_text()) if end is End.STOPPED else None
    return Outcome(end, code, time.monotonic() - start, stopped_at, _last_line(output))


def _wait(process: subprocess.Popen[bytes], log: Path, deadline: float) -> End:
    while time.monotonic() < deadline:
        if stopped_marker(log).exists():
            return End.STOPPED
        if _all_done(log):
            return End.RECORDED
        with suppress(subprocess.TimeoutExpired):
            return End.FINISHED if process.wait(_POLL) == 0 else End.CRASHED
    return End.TIMED_OUT


def _all_done(log: Path) -> bool:
    """Say whether every rank of the job has recorded its last step."""
    if not done_marker(log, 0).exists():
        return False
    with (log / "rank-0.jsonl").open("rb") as file:
        header = json.loads(file.readline())
    return all(done_marker(log, rank).exists() for rank in range(header["world_size"]))


def _end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started, those in sessions of their own too."""
    tree = _descendants(process.pid)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in tree:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found, todo = [], [root]
    while todo:
        more = children.get(todo.pop(), [])
        found += more
        todo += more
    return found


def _parents() -> list[tuple[int, int]]:
    """Return (process, parent) of every process that can be seen."""
    pairs = []
    if Path("/proc/self/stat").exists():
        for place in Path("/proc").iterdir():
            if place.name.isdecimal():
                with suppress(OSError, IndexError, ValueError):
                    # The name in parentheses may hold anything; what follows it does not.
                    fields = (place / "stat").read_text(errors="replace").rpartition(")")[2]
                    pairs.append((int(place.name), int(fields.split()[1])))
        return pairs
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False
    )
    for line in listed.stdout.splitlines():
        pid, parent = line.split()
        pairs.append((int(pid), int(parent)))
    return pairs


def _last_line(output: Path) -> str:
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - _TAIL))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
