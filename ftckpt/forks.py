"""Carry out tasks in copies of this process, where threads would wait for the interpreter's lock.

A copy has all that was opened and planned here, so that a task is no more than a number: each copy
counts through the tasks by itself. What it makes comes back pickled. Copies are made only where a
fork is safe: on Linux, by the main thread, while there is no other. Everywhere else, and where one
alone works, threads do the same.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from .errors import FtckptError, NoResourceError
from .memory import divide
from .progress import NULL, Counter

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

# Memory that a copy takes for itself beside what its work holds: pages of the interpreter's, which
# are shared until an object on them is touched.
_OWN = 24 << 20
# More threads than that do no more than so many copies: each holds the interpreter's lock a sixth
# of its time.
_THREADS = 5

_COUNT = 0.1  # seconds between what a copy says of its progress
_PATIENCE = 0.2  # seconds that threads which have nothing left to do may take to end
_END = 2.0  # seconds that a copy which was killed may take to die
_PR_SET_PDEATHSIG = 1
# The terminal, or who stops a job, tells the whole group; the first process ends the copies.
_FOR_THE_FIRST = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# What a copy says, each with a value; it is answered with the number of a task.
_NEXT, _COUNTED, _MADE, _FAILED, _DONE = range(5)


class Stream(Protocol[T_contra, R_co]):
    """Makes something of each of many tasks."""

    def __call__(self, tasks: Iterator[T_contra], counter: Counter, jobs: int, /) -> Iterator[R_co]:
        """Yield what is made, by so many threads, and count what is done."""


def run(
    tasks: Iterable[T],
    stream: Stream[T, R],
    *,
    jobs: int,
    forks: int = 0,
    counter: Counter = NULL,
) -> Iterator[R]:
    """Yield what `stream` makes of all tasks, in the order in which it is made.

    The first failure ends every copy and is raised here; so does closing the iterator.

    Args:
        tasks: independent; going through them changes nothing.
        stream: takes a task when it begins one. What it makes can be pickled.
        jobs: number of threads, where this process does it.
        forks: number of copies of this process that may do it instead, by one thread each.
        counter: what a copy counts comes here.

    Raises:
        NoResourceError: a copy was killed, as by a system that is out of memory.
        Exception: whatever `stream` or going through the tasks raises.
    """
    rest = iter(tasks)
    first = list(islice(rest, 2))
    tasks = chain(first, rest)
    if min(forks, len(first)) < 2 or not are_safe():
        yield from stream(tasks, counter, jobs)
        return
    crew: list[_Copy] = []
    try:
        for _ in range(forks):
            try:
                crew.append(_Copy(tasks, stream, forks, [one.line for one in crew]))
            except OSError:  # the system makes no more: fewer do the same work
                break
        if crew:
            yield from _answers(crew, counter)
    finally:
        for one in crew:
            one.kill()
        for one in crew:
            one.bury()
    if not crew:
        yield from stream(tasks, counter, jobs)


def affordable(jobs: int, each: int, room: int) -> int:
    """Return how many copies of this process do more than `jobs` threads; 0 where none do.

    Args:
        jobs: number of threads that are wanted and fit into the memory.
        each: bytes that one of them holds.
        room: bytes that there are.
    """
    forks = min(jobs, room // (each + _OWN))
    return forks if forks >= max(2, min(jobs, _THREADS)) else 0


def are_safe() -> bool:
    """Say whether a copy of this process would be whole.

    A copy has only the thread that made it, and locks that others held stay locked for ever. Of
    torch's own threads nothing is known here.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    # Those of `engine.run` have been told to end.
    until = time.monotonic() + _PATIENCE
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))
    return len(sys._current_frames()) == 1


class _Copy:
    """One copy, as the first process knows it.

    Args:
        tasks: see `run`.
        stream: see `run`.
        forks: how many there will be.
        lines: to the copies made before: not this one's matter.

    Attributes:
        line: to it.

    Raises:
        OSError: the system makes no more.
    """

    def __init__(
        self,
        tasks: Iterable[Any],
        stream: Stream[Any, Any],
        forks: int,
        lines: Sequence[Connection],
    ) -> None:
        from multiprocessing import Pipe

        parent = os.getpid()
        self.line, theirs = Pipe()
        # An interruption that comes before the copy ignores it would be told by both.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_FIRST)
        try:
            with warnings.catch_warnings():
                # Of threads that a library of C has and ends before a fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.number = os.fork()
            if not self.number:
                for line in (*lines, self.line):
                    line.close()
                gc.freeze()  # looking for what is garbage would make pages of all that was shared
                divide(forks)
                _live(parent, theirs, tasks, stream, before)
        except OSError:
            self.line.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._status: int | None = None

    def kill(self) -> None:
        """Let it do nothing more."""
        with suppress(ProcessLookupError):
            if self._status is None:
                os.kill(self.number, signal.SIGKILL)

    def bury(self, within: float = _END) -> int | None:
        """Return its wait status; None where it does not die, as one that hangs in the kernel."""
        until = time.monotonic() + within
        while self._status is None:
            try:
                number, status = os.waitpid(self.number, os.WNOHANG)
            except ChildProcessError:  # the system buries them for a host that wants none
                number, status = self.number, 0
            if number:
                self._status = status
            elif time.monotonic() > until:
                break
            else:
                time.sleep(0.001)
        self.line.close()
        return self._status


def _answers(crew: Sequence[_Copy], counter: Counter) -> Iterator[Any]:
    """Deal out the tasks, and yield what comes back."""
    from multiprocessing.connection import wait

    working = {one.line: one for one in crew}
    number = 0
    while working:
        for line in wait(list(working)):
            one = working[line]  # type: ignore[index]
            try:
                said, value = one.line.recv()
                if said == _NEXT:
                    one.line.send(number)
                    number += 1
            except (EOFError, OSError):
                raise _died(one.bury()) from None
            if said == _COUNTED:
                counter.add(value)
            elif said == _MADE:
                yield value
            elif said == _FAILED:
                raise value
            elif said == _DONE:
                del working[one.line]


def _died(status: int | None) -> Exception:
    code = None if status is None else os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        return NoResourceError(
            "a process that did a part of the work was killed, as by a system without memory",
            hint="run it again with --jobs 1, or with less --max-memory",
        )
    return RuntimeError(f"a process that did a part of the work has ended by itself ({code})")


def _live(
    parent: int,
    connection: Connection,
    tasks: Iterable[Any],
    stream: Stream[Any, Any],
    mask: Iterable[int],
) -> NoReturn:
    """Be a copy to the end; what was opened and registered is for the first process to close."""
    code = 1
    try:
        for number in _FOR_THE_FIRST:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _die_with(parent)
        line = _Line(connection)
        try:
            for made in stream(line.dealt(tasks), line, 1):
                line.say(_MADE, made)
            line.say(_DONE)
            code = 0
        except BaseException as error:
            line.say(_FAILED, _portable(error))
    except OSError:
        pass  # nobody listens any more
    finally:
        os._exit(code)


def _die_with(parent: int) -> None:
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
            self.say(_NEXT)
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
            self._connection.send((_COUNTED, amount))


def _portable(error: BaseException) -> Exception:
    """Return an error that comes through a pickle as it is; else one that says what it was."""
    import traceback

    text = "".join(traceback.format_exception(error))
    try:
        again = pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(text)
    if not isinstance(again, Exception):
        return RuntimeError(text)
    if not isinstance(again, FtckptError):
        again.add_note(text)
    return again
