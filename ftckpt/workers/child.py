"""Work that a copy of this process does (`ftckpt.workers.processes` makes the copies)."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from ftckpt.errors import ExitCode
from ftckpt.progress import ASKING, Counter

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

# What a copy says, each with a value; it is answered with the number of a task.
NEXT, COUNTED, MADE, FAILED, DONE = range(5)
# The terminal, or who stops a job, tells the whole group; the first process ends the copies.
FOR_THE_FIRST = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *ASKING)

_COUNT = 0.1  # seconds between what a copy says of its progress
_PR_SET_PDEATHSIG = 1


class Stream(Protocol[T_contra, R_co]):
    """Makes something of each of many tasks."""

    def __call__(self, tasks: Iterator[T_contra], counter: Counter, jobs: int, /) -> Iterator[R_co]:
        """Yield what the threads make, and count what is done."""


def live(
    parent: int,
    connection: Connection,
    tasks: Iterable[Any],
    stream: Stream[Any, Any],
    mask: Iterable[int],
) -> NoReturn:
    """Be a copy to the end; what was opened and registered is for the first process to close.

    Args:
        parent: number of the first process.
        connection: to it.
        tasks: see `processes.run_in_processes`.
        stream: see `processes.run_in_processes`.
        mask: the signals that are blocked from now on.
    """
    code = 1
    try:
        for number in FOR_THE_FIRST:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        die_with(parent)
        line = _Line(connection)
        try:
            for made in stream(line.dealt(tasks), line, 1):
                line.say(MADE, made)
            line.say(DONE)
            code = 0
        except BaseException as error:
            line.say(FAILED, _portable(error))
    except MemoryError:  # there is none to say it
        code = ExitCode.NO_RESOURCE
    except OSError:
        pass  # nobody listens any more
    finally:
        os._exit(code)


def die_with(parent: int) -> None:
    """Let the system end this process when the first one ends, by whatever."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        raise ProcessLookupError


class _Line:
    """The line to the first process, as a copy knows it; and the counter that counts there."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._amount = 0
        self._told = time.monotonic()

    def say(self, what: int, value: object = None) -> None:
        """Send one message, and before it what was counted."""
        with self._lock:
            self._tell()
            self._connection.send((what, value))

    def dealt(self, tasks: Iterable[T]) -> Iterator[T]:
        """Yield the tasks that are this copy's, each when it is wanted."""
        numbered = enumerate(tasks)
        while True:
            self.say(NEXT)
            wanted = self._connection.recv()
            for number, task in numbered:
                if number == wanted:
                    yield task
                    break
            else:
                return

    def start(self, label: str, total: int | None, unit: str = "B") -> None:
        """Do nothing: the first process says what stage it is."""

    def add(self, amount: int) -> None:
        """Count; the first process hears of it a few times a second."""
        with self._lock:
            self._amount += amount
            if time.monotonic() - self._told >= _COUNT:
                self._tell()

    def _tell(self) -> None:
        amount, self._amount, self._told = self._amount, 0, time.monotonic()
        if amount:
            self._connection.send((COUNTED, amount))


def _portable(error: BaseException) -> Exception:
    """Return an error that comes through a pickle as it is; else one that says what it was."""
    import traceback

    text = "".join(traceback.format_exception(error))
    try:
        pickle.dumps(error)
        again = copy(error)  # made anew of the same parts, as from a pickle
    except Exception:
        return RuntimeError(text)
    if not isinstance(again, Exception):
        return RuntimeError(text)
    again.add_note(text)
    return again
