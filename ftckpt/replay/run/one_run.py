"""One run of the user's command: a fresh process tree, recorded, ended once it has shown enough.

The run ends in one of four ways: by itself, killed at its stopping point (as a failure would,
without a chance to save), after recording everything requested, or at its time limit. A file keeps
all of its output.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ftckpt.errors import NotFoundError
from ftckpt.replay.processes import PREFIX, Settings, bound, done_marker, end_run, stopped_marker

# Set unless the user has set them, the same for every run; the answer reports them.
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
class RunOutcome:
    """The result of one run.

    Attributes:
        code: exit code of the command; None if it was ended from outside.
        seconds: duration.
        stopped_at: the step after which it was stopped, if it was.
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
    path = [str(Path(__file__).parents[1] / "inject"), own.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return PINNED | kept | settings.environment()


def require_program(command: Sequence[str]) -> None:
    """Look for the program of a command, as its run will.

    Raises:
        NotFoundError: it does not exist.
    """
    if shutil.which(command[0]) is None:
        raise NotFoundError(f"cannot run {command[0]}: no such program")


def run(
    command: Sequence[str],
    settings: Settings,
    *,
    cwd: Path,
    output: Path,
    timeout: float,
    read_only: str = "",
) -> RunOutcome:
    """Run a command to the end that `settings` define, and leave no process of it behind.

    Args:
        command: program and arguments.
        settings: for the recorder; `log` names the directory.
        cwd: working directory.
        output: file for both output streams.
        timeout: seconds after which it is ended.
        read_only: a file or directory that it cannot write (`can_make_read_only`).

    Raises:
        NotFoundError: the program does not exist.
    """
    require_program(command)
    variables = environment(settings)
    begin = time.monotonic()
    begun: list[subprocess.Popen[bytes]] = []
    # A thread of its own, which lives as long as the process should. A signal is raised here, at
    # any place, and must not lose a process that starts just then: the thread finishes each task
    # before the next.
    with output.open("wb") as sink, ThreadPoolExecutor(1) as starter:
        starter.submit(int).result()

        def start() -> None:
            begun.append(
                subprocess.Popen(
                    bound(command, read_only),
                    cwd=cwd,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

        def end() -> None:
            starter.submit(int).result()
            for process in begun:
                end_run(process, settings.log)

        try:
            starter.submit(start).result()
            how, stopped_at = _wait(begun[0], Path(settings.log), begin + timeout)
        finally:
            try:
                end()
            except BaseException:  # a late signal; the next one would leave at once
                end()
                raise
    code = begun[0].returncode if how in (End.FINISHED, End.CRASHED) else None
    return RunOutcome(how, code, time.monotonic() - begin, stopped_at, _last_line(output))


def _wait(process: subprocess.Popen[bytes], log: Path, deadline: float) -> tuple[End, int | None]:
    """Wait for a run's end; return it, and the step after which to stop the run."""
    while time.monotonic() < deadline:
        if (step := _stopped(log)) is not None:
            return End.STOPPED, step
        if _all_done(log):
            return End.RECORDED, None
        with suppress(subprocess.TimeoutExpired):
            return End.FINISHED if process.wait(_POLL) == 0 else End.CRASHED, None
    return End.TIMED_OUT, None


def _stopped(log: Path) -> int | None:
    """Return the step after which the run waits to be stopped; None while it does not."""
    try:
        text = stopped_marker(log).read_text()
    except FileNotFoundError:
        return None
    return int(text) if text else None  # created, and not yet written


def _all_done(log: Path) -> bool:
    """Whether every rank of the job has recorded its last step."""
    if not done_marker(log, 0).exists():
        return False
    with (log / "rank-0.jsonl").open("rb") as file:
        header = json.loads(file.readline())
    return all(done_marker(log, rank).exists() for rank in range(header["world_size"]))


def _last_line(output: Path) -> str:
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - _TAIL))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
