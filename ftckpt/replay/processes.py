"""Processes of a run: bound to the life of their parent, found anywhere, and ended.

A process may leave its parent, its group and its session, but it and its children keep the
environment with their log's path. If the system does not show that (outside Linux), only
descendants of the run's first process are found.

Settings that a recorded process gets through its environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

PREFIX = "FTCKPT_REPLAY_"


@dataclass(frozen=True, slots=True)
class Settings:
    """How a process records itself.

    Attributes:
        log: directory of the log; "" records nothing.
        at: number of steps of the training before the process starts.
        last: the last step to record; the process then waits to be ended. 0: as long as it runs.
        dense_from: first step in which whole tensors are read, beside the very first.
        every: from there on, whole tensors are read every this many steps; 0: never.
        stop_at: end the process after this step, as a failure would; 0: never.
        stop_after_save: end it after the step of its first save.
        passes: backward passes of step `pass_step` that the checkpoint holds, if it was saved
            within a window of gradient accumulation; that step is recorded from there on.
        pass_step: the first step after the checkpoint, if `passes` is not 0.
        look_step: step at which the values of tensors are kept; 0: none.
        look_event: the event that they belong to.
        look_items: their names, one per line.
    """

    log: str = ""
    at: int = 0
    last: int = 0
    dense_from: int = 1
    every: int = 1
    stop_at: int = 0
    stop_after_save: bool = False
    passes: int = 0
    pass_step: int = 0
    look_step: int = 0
    look_event: str = ""
    look_items: str = ""

    def environment(self) -> dict[str, str]:
        """Return the variables for `read_settings`."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {PREFIX + name.upper(): str(int(v) if isinstance(v, bool) else v)
                for name, v in values}  # fmt: skip

    def reads_tensors(self, step: int) -> bool:
        """Whether whole tensors are read at the beginning of this step and in it."""
        if self.every and (step == self.at + 1 or step == 1 or (self.last and step > self.last)):
            return True
        return bool(self.every) and step >= self.dense_from and not (
            (step - self.dense_from) % self.every
        )  # fmt: skip


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings in an environment; a variable that is not a number counts as absent."""
    values: dict[str, str | int | bool] = {}
    for field in fields(Settings):
        text = environment.get(PREFIX + field.name.upper())
        if text is None:
            continue
        if isinstance(field.default, str):
            values[field.name] = text
        elif text.isdecimal():
            values[field.name] = text != "0" if field.name == "stop_after_save" else int(text)
    return Settings(**values)  # type: ignore[arg-type]


def done_marker(folder: Path, rank: int) -> Path:
    """Return the file by which a rank reports that its recording is complete."""
    return folder / f"rank-{rank}.done"


def stopped_marker(folder: Path) -> Path:
    """Return the file by which a process reports that it is where it should be ended."""
    return folder / "stopped"


def saves_file(folder: Path, rank: int) -> Path:
    """Return the file in which a rank notes its saves: lines of steps and backward passes."""
    return folder / f"rank-{rank}.saves"


def values_file(folder: Path, rank: int, number: int) -> Path:
    """Return the file with the values of one tensor of `Settings.look_items`."""
    return folder / "values" / f"rank-{rank}-{number}.bin"


_LOG = f"{PREFIX}LOG=".encode()
_PROC = Path("/proc")
# Seconds until killed processes must be gone; one that the kernel keeps longer runs no more code.
_LETTING_GO = 5.0
# 1 is PR_SET_PDEATHSIG: the kernel kills the process when the thread that started it ends, in any
# way. The parent may already be gone; and Python has set two signals to be ignored.
_BOUND = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)

def call(name, *arguments):
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)

def make_read_only(place):
    # CLONE_NEWNS takes a privilege; with CLONE_NEWUSER, in which we are who we were, none.
    user, group = os.geteuid(), os.getegid()
    try:
        call("unshare", 0x20000)
    except OSError:
        call("unshare", 0x10020000)
        for file, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"),
                           ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as out:
                out.write(line)
    call("mount", None, b"/", None, 0x84000, None)  # MS_REC | MS_SLAVE: nothing leads back
    call("mount", place, place, None, 0x5000, None)  # MS_BIND | MS_REC
    # MS_BIND | MS_REMOUNT | MS_RDONLY, with the flags that the mount has (ST_* to MS_*).
    has = os.statvfs(place).f_flag
    flags = has & 14 | has & 0xc00 | (1 << 21 if has & 0x1000 else 0)
    call("mount", None, place, None, 0x1021 | flags, None)
    if not os.statvfs(place).f_flag & os.ST_RDONLY:
        raise OSError("the mount is not read-only")

try:
    if sys.argv[2]:
        make_read_only(os.fsencode(sys.argv[2]))
    if hasattr(libc, "prctl"):  # Linux; a namespace of one's own forgets what was set before
        libc.prctl(1, int(signal.SIGKILL))
    if os.getppid() == int(sys.argv[1]):
        if sys.argv[3:]:
            os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    sys.exit(f"cannot run {' '.join(sys.argv[3:4])}: {error.strerror or error}")
"""


def bound(command: Sequence[str], read_only: str = "") -> list[str]:
    """Return a command that runs `command` only while the thread that starts it lives.

    On other systems than Linux it is `command` itself. `read_only` is a file or directory that
    `command` cannot write, if `can_make_read_only` allows it; "" for none.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _BOUND, str(os.getpid()), read_only, *command]


def can_make_read_only(place: str) -> bool:
    """Whether a run can be kept from writing into a place, by its own mounts.

    The kernel must allow that to this user: with a privilege, or by user namespaces.
    """
    if sys.platform != "linux":
        return False
    tried = subprocess.run(
        bound([], place), stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    return tried.returncode == 0


def end_run(process: subprocess.Popen[bytes], log: str) -> None:
    """Kill a group's leader, and all processes that record into `log` or descend from either.

    `log` is the run's `Settings.log`; "" without one.
    """

    def left() -> set[int]:
        first = {process.pid} if process.poll() is None else set()
        return _with_descendants(first | _recording(lambda other: bool(log) and other == log))

    first = left()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    _end(first, left)
    process.wait()


def end_left(folder: Path) -> bool:
    """Kill the remaining processes of a trial's runs (`FOLDER/RUN/log`); return whether any ran."""

    def is_of_trial(log: str) -> bool:
        places = Path(log).parents
        try:
            return len(places) > 1 and os.path.samefile(places[1], folder)
        except OSError:
            return False

    def left() -> set[int]:
        return _with_descendants(_recording(is_of_trial))

    return bool(_end(left(), left))


def end_marked(variable: str, value: str) -> set[int]:
    """Kill the processes whose environment has a variable, and their descendants.

    Returns:
        Those that are still there: the kernel keeps them, or they are another user's.
    """
    _end(marked(variable, value), lambda: marked(variable, value))
    return marked(variable, value)


def marked(variable: str, value: str) -> set[int]:
    """Return the processes whose environment has a variable, and their descendants."""
    mark = f"{variable}={value}".encode()
    return _with_descendants(_having(lambda variables: mark in variables))


def _end(first: set[int], left: Callable[[], set[int]]) -> set[int]:
    """Kill processes until `left` finds no more; return all that were found."""
    found, living = set(first), first
    deadline = time.monotonic() + _LETTING_GO
    while living and time.monotonic() < deadline:
        for pid in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        living = left()
        found |= living
    return found


def _recording(wanted: Callable[[str], bool]) -> set[int]:
    """Return the processes that record into a wanted log, except this one and its ancestors."""

    def records(variables: Sequence[bytes]) -> bool:
        logs = (v.removeprefix(_LOG) for v in variables if v.startswith(_LOG))
        return any(wanted(os.fsdecode(log)) for log in logs)

    return _having(records)


def _having(wanted: Callable[[Sequence[bytes]], bool]) -> set[int]:
    """Return the processes with a wanted environment, except this one and its ancestors."""
    found: set[int] = set()
    for pid in _living().keys() - _ourselves():
        try:
            variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or another user's
            continue
        if wanted(variables):
            found.add(pid)
    return found


def _ourselves() -> set[int]:
    parents, pid, found = _living(), os.getpid(), set[int]()
    while pid and pid not in found:
        found.add(pid)
        pid = parents.get(pid, 0)
    return found


def _with_descendants(roots: Iterable[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in _living().items():
        children.setdefault(parent, []).append(pid)
    todo = list(roots)
    found = set(todo)
    while todo:
        more = children.get(todo.pop(), [])
        found.update(more)
        todo += more
    return found


def _living() -> dict[int, int]:
    """Return the parent of every visible live process."""
    if not (_PROC / "self" / "stat").exists():
        listed = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=False
        )
        rows = (line.split() for line in listed.stdout.splitlines())
        return {int(pid): int(parent) for pid, parent, state in rows if state[0] != "Z"}
    parents = {}
    for place in _PROC.iterdir():
        if place.name.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                # The name in parentheses may hold anything; the rest may not.
                fields = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    parents[int(place.name)] = int(fields[1])
    return parents
