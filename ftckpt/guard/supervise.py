"""Start a command below a keeper, signal it, and wait for its end.

What reaches the main loop of a guard: signals, and what its threads tell it.

Keep the last lines that a command prints on stderr, for the alert about its end.

A terminal stays the command's own: there a person sees them, and a progress bar needs it. A file
(Slurm's output) is read where the command wrote it; what goes into a pipe passes through here.
"""

from __future__ import annotations

import os
import re
import select
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, Any

from ftckpt.errors import NoResourceError
from ftckpt.replay.processes import end_marked, marked
from ftckpt.storage.secrets import masked

KEEPER = Path(__file__).with_name("keeper.py")
# The variable that marks every process of a guarded command, with the guard's token.
MARK = "FTCKPT_GUARD"


class Whom(StrEnum):
    """Which processes of a command a signal is for."""

    COMMAND = "command"
    RANKS = "ranks"
    GROUP = "group"


class GuardedCommand:
    """A running command; its whole tree ends with it, and with this process.

    Args:
        words: the command and its arguments.
        environment: all its variables.
        token: marks its processes, so that they can be found if everything else has failed.
        locks: descriptors that are held until its last process has ended.
        stdout: where its output goes; None for ours.
        stderr: the same of what it prints there.

    Raises:
        NoResourceError: the system starts no more processes.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        token: str,
        *,
        locks: Sequence[int] = (),
        stdout: IO[bytes] | int | None = None,
        stderr: int | None = None,
    ) -> None:
        self._token = token
        self._said = b""
        self.status: int | None = None
        self.pid = 0
        control, self._control = os.pipe()
        self._answers, status = os.pipe()
        line = [sys.executable, "-I", "-S", str(KEEPER), str(control), str(status)]
        try:
            self._process = subprocess.Popen(
                [*line, ",".join(map(str, locks)) or "-1", *words],
                env={**environment, MARK: token},
                pass_fds=[control, status, *locks],
                start_new_session=True,
                stdout=stdout,
                stderr=stderr,
            )
        except OSError as error:
            os.close(self._control)
            os.close(self._answers)
            raise NoResourceError(f"cannot start a process: {error}") from error
        finally:
            os.close(control)
            os.close(status)
        while not self.pid and self.status is None:
            self.read()

    @property
    def keeper(self) -> int:
        """The pid of the process between this one and the command."""
        return self._process.pid

    def fileno(self) -> int:
        """Return what becomes readable when the command has ended."""
        return self._answers

    def read(self) -> int | None:
        """Read what the keeper says; return the command's wait status once it has ended."""
        if self.status is not None:
            return self.status
        said = os.read(self._answers, 4096)
        if not said:
            self._lost()
            return self.status
        *lines, self._said = (self._said + said).split(b"\n")
        for line in lines:
            word, number = line.split()
            if word == b"pid":
                self.pid = int(number)
            else:
                self.status = int(number)
                self._close()
        return self.status

    def send(self, number: int, whom: Whom = Whom.COMMAND) -> None:
        """Send a signal; nothing if the command has ended."""
        with suppress(OSError):
            os.write(self._control, f"signal {int(number)} {whom}\n".encode())

    def end(self) -> None:
        """Kill the command and everything below it, and wait until it is gone."""
        with suppress(OSError):
            os.close(self._control)
        self._control = -1
        if self.status is None:
            self._process.wait()
            self._lost()

    def _lost(self) -> None:
        """The keeper ended without a word: it was killed, or told to end everything."""
        orphans = {self.pid, *marked(MARK, self._token)}
        end_marked(MARK, self._token)
        for pid in orphans:  # ours where this process adopts them
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.status = int(signal.SIGKILL)
        self._close()

    def _close(self) -> None:
        for descriptor in (self._control, self._answers):
            with suppress(OSError):
                os.close(descriptor)
        self._control = self._answers = -1
        self._process.wait()


# Passed on to the command.
FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGCONT")
    if hasattr(signal, name)
)
# These end the guard, too.
STOPPING = (signal.SIGTERM, signal.SIGINT)
# Seconds between two looks at what has no event: ages, locks.
TICK = 1.0


class NoticedError(BaseException):
    """A signal announced a preemption while a checkpoint was chosen."""


class Events:
    """The events of one guard, in the order in which they came.

    Args:
        notice_signals: announce a preemption.
    """

    def __init__(self, notice_signals: Collection[int]) -> None:
        self._notice_signals = notice_signals
        self._queue: SimpleQueue[object] = SimpleQueue()
        self._wake, self._ring = os.pipe()
        for descriptor in (self._wake, self._ring):
            os.set_blocking(descriptor, False)
        self._choosing = False
        self._before: dict[int, Any] = {}

    def tell(self, event: object) -> None:
        """Put an event before the main loop; from any thread, or a signal's handler."""
        self._queue.put(event)
        with suppress(OSError):  # full: it wakes anyway
            os.write(self._ring, b"x")

    def drain(self) -> Iterator[object]:
        """Yield what has come."""
        with suppress(BlockingIOError):
            while len(os.read(self._wake, 4096)) == 4096:
                continue
        while True:
            try:
                yield self._queue.get_nowait()
            except Empty:
                return

    def wait(self, seconds: float, *others: int) -> bool:
        """Wait for an event, `seconds` at most; return whether one of the other files is ready."""
        ready = select.select([self._wake, *others], [], [], seconds)[0]
        return any(one in ready for one in others)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._wake)
        os.close(self._ring)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Take the signals that are passed on; leave those alone that our parent ignores."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in FORWARDED:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._receive)
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Let a signal cut short what is done here: it may read for longer than is left.

        Raises:
            NoticedError: one announced a preemption.
        """
        try:
            self._choosing = True
            yield
        finally:
            self._choosing = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(number)
        if self._choosing and number in self._notice_signals:
            raise NoticedError
        if self._choosing and number in STOPPING:
            if callable(before):
                before(number, frame)
                return
            raise SystemExit(128 + number)
        self.tell(signal.Signals(number))


_KEPT = 16 << 10
_LINES, _LONGEST = 5, 300
_JOIN_S = 5.0
_FULL = re.compile(r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class LastWords:
    """The end of what one command prints.

    Args:
        stderr: this process's own, to which the command's goes in any case.

    Attributes:
        descriptor: the command's stderr; None for ours.
    """

    def __init__(self, stderr: int = 2) -> None:
        self._stderr, self._tail = stderr, b""
        self._start: int | None = None
        self._thread: threading.Thread | None = None
        self.descriptor: int | None = None
        try:
            kind = os.fstat(stderr)
        except OSError:  # closed
            return
        if stat.S_ISREG(kind.st_mode):
            self._start = kind.st_size
        elif stat.S_ISFIFO(kind.st_mode) or stat.S_ISSOCK(kind.st_mode):
            source, self.descriptor = os.pipe()
            self._thread = threading.Thread(
                target=self._pass_on, args=(source,), name="ftckpt-stderr", daemon=True
            )

    def started(self) -> None:
        """Note that the command has its own copy of the descriptor."""
        if self.descriptor is not None and self._thread is not None:
            os.close(self.descriptor)
            self.descriptor = None
            self._thread.start()

    def text(self) -> str:
        """Return the end of what was printed, once the command has ended; "" if nobody kept it."""
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        elif self._start is not None:
            self._tail = self._written(self._start)
        return _ESCAPES.sub("", self._tail.decode("utf-8", "replace"))

    def _pass_on(self, source: int) -> None:
        with open(source, "rb", buffering=0) as file:
            while data := file.read(_KEPT):
                self._tail = (self._tail + data)[-_KEPT:]
                with suppress(OSError):  # nobody listens any more; the command goes on
                    while data:
                        data = data[os.write(self._stderr, data) :]

    def _written(self, start: int) -> bytes:
        try:
            file = os.open(f"/dev/fd/{self._stderr}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            end = os.fstat(file).st_size
            return os.pread(file, _KEPT, max(start, end - _KEPT))
        except OSError:
            return b""
        finally:
            os.close(file)


def last_lines(text: str) -> str:
    """Return the last lines of a text in one line, for a message that may leave the machine."""
    lines = [line.strip() for line in re.split(r"[\r\n]", text)]
    shown = ["".join(c if c.isprintable() else "?" for c in line) for line in lines if line]
    # Before they are cut: half a URL does not show what was secret in it.
    return " | ".join(masked(line)[:_LONGEST] for line in shown[-_LINES:])


def tells_of_a_full_disk(text: str) -> bool:
    """Say whether the last words are of a disk or a quota that is full."""
    return _FULL.search(text) is not None
