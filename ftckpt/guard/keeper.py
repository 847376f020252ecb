"""Run one command for a guard, and end everything it started when the guard or the command ends.

A program of its own, with the standard library alone: `python -I -S keeper.py CONTROL STATUS LOCKS
COMMAND...`. It is the parent of the command and adopts its orphans (Linux), so that no process of
the command is lost, none stays a zombie, and a signal never meets a stranger's process.

- CONTROL: a pipe from the guard. A line `signal NUMBER WHOM` sends a signal. Its end means that the
  guard has ended, in whatever way: everything is killed.
- STATUS: a pipe to the guard: `pid N`, and at the end, when no process is left, `exit STATUS`.
- LOCKS: descriptors, by commas, that are held as long as any process of the command lives; -1 for
  none.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

# <sys/prctl.h>: be sent a signal when the parent ends; adopt the orphans below this process.
_PDEATHSIG, _SUBREAPER = 1, 36
# Only the kernel sends these to a process for its own sake.
_SPARED = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS}
_SPARED |= {signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}
# Seconds for what the command left behind, between SIGTERM and SIGKILL.
_LEAVING = 3.0
# What launchers set for each rank: the processes of a torchrun that train.
RANK = b"LOCAL_RANK="

Handlers = Mapping[signal.Signals, Any]


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans(*, wanted: bool = True) -> None:
    """Become the parent of every process below this one whose own parent ends; or no more."""
    _prctl(_SUBREAPER, int(wanted))


def _start(command: Sequence[str], handlers: Handlers) -> int:
    """Start the command in a process group of its own; return its pid."""
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        with suppress(OSError):  # it did so itself, or has ended
            os.setpgid(pid, pid)
        return pid
    code = 126
    try:
        os.setpgid(0, 0)
        _prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(code)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.execvp(command[0], list(command))
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        os.write(2, f"ftckpt: cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(code)


def below(root: int) -> list[int]:
    """Return every living or dead process below one, as /proc shows them."""
    children: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(name))
    found, todo = [], [root]
    while todo:
        more = children.get(todo.pop(), [])
        found += more
        todo += more
    return found


def started_at(pid: int) -> int | None:
    """Return when a process was started, in ticks since the machine was; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _is_rank(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(one.startswith(RANK) for one in file.read().split(b"\0"))
    except OSError:
        return False


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def ranks_below(root: int) -> list[int]:
    """Return the ranks that a launcher started; a rank's own workers inherit its environment."""
    ranks = {pid for pid in below(root) if _is_rank(pid)}
    return [pid for pid in ranks if _parent(pid) not in ranks]


class _Keeper:
    def __init__(self, control: int, status: int, command: Sequence[str]) -> None:
        self._control, self._status = control, status
        self._told = b""
        self._ended: int | None = None
        self._wake, self._ring = os.pipe()
        os.set_blocking(self._ring, False)
        os.set_blocking(self._wake, False)
        handlers: dict[signal.Signals, Any] = {}
        for number in signal.valid_signals() - _SPARED:
            if number < signal.SIGRTMIN:
                # What the caller ignores (nohup) the command ignores, too.
                ignored = signal.getsignal(number) is signal.SIG_IGN
                own = number in (signal.SIGPIPE, signal.SIGXFSZ)  # ignored by Python itself
                keeps = signal.SIG_IGN if ignored and not own else signal.SIG_DFL
                handlers[signal.Signals(number)] = keeps
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._ring, warn_on_full_buffer=False)
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)
        self._pid = _start(command, handlers)
        self._say(f"pid {self._pid}")

    def run(self) -> None:
        """Keep the command until it, or the guard, ends."""
        while self._ended is None:
            ready = select.select([self._control, self._wake], [], [], 1.0)[0]
            if self._control in ready and not self._obey():
                self._kill(signal.SIGKILL)
                return
            self._reap()
        if self._reap():  # it left processes behind
            self._kill(signal.SIGTERM, time.monotonic() + _LEAVING)
            self._kill(signal.SIGKILL)
        self._say(f"exit {self._ended}")

    def _obey(self) -> bool:
        """Carry out what the guard says; False if it has ended."""
        told = os.read(self._control, 4096)
        if not told:
            return False
        *lines, self._told = (self._told + told).split(b"\n")
        for line in lines:
            _, number, whom = line.decode().split()
            self._send(int(number), whom)
        return True

    def _send(self, number: int, whom: str) -> None:
        ranks = ranks_below(os.getpid()) if whom == "ranks" else []
        with suppress(ProcessLookupError, PermissionError):
            if whom == "group":
                os.killpg(self._pid, number)
            elif not ranks:
                os.kill(self._pid, number)
        for pid in ranks:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def _reap(self) -> bool:
        """Collect what has ended; return whether any process is left."""
        with suppress(BlockingIOError):
            os.read(self._wake, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._pid:
                self._ended = status

    def _kill(self, number: signal.Signals, until: float | None = None) -> None:
        """Send a signal to everything below until nothing is left, or the time has come."""
        sent: set[int] = set()
        while self._reap() and (until is None or time.monotonic() < until):
            for pid in below(os.getpid()) or [self._pid]:
                # A second SIGTERM may cut short what the first one began.
                if number is signal.SIGKILL or pid not in sent:
                    sent.add(pid)
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
            time.sleep(0.005)

    def _say(self, line: str) -> None:
        with suppress(OSError):  # the guard has ended
            os.write(self._status, f"{line}\n".encode())


def main() -> NoReturn:
    """Run the command that `sys.argv` names."""
    control, status = map(int, sys.argv[1:3])
    for descriptor in (control, status, *map(int, sys.argv[3].split(","))):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    adopt_orphans()
    _Keeper(control, status, sys.argv[4:]).run()
    os._exit(0)


if __name__ == "__main__":
    main()
