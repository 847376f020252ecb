"""Carry out tasks in copies of this process, where threads would wait for the interpreter's lock.

A copy has all that was opened and planned here, so that a task is just a number: each copy
counts through the tasks by itself. What it makes comes back pickled. Copies are made only where a
fork is safe: on Linux, by the main thread, while no other runs. Everywhere else, and where one
alone works, threads do the same.

Work that a copy of this process does (`ftckpt.workers.processes` makes the copies).
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
from contextlib import contextmanager, suppress
from copy import copy
from importlib import import_module
from importlib.util import find_spec
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from ftckpt.errors import ExitCode, NoResourceError
from ftckpt.progress import ASKING, NULL, Counter

from .budget import MOST_THREADS, budget, divide, held, own_of_a_copy

if TYPE_CHECKING:
    from concurrent.futures import Executor
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


R = TypeVar("R")

_LIBRARIES = ("numpy", "xxhash", "zstandard")
_PATIENCE = 0.2  # seconds that threads which have nothing left to do may take to end
_END = 1.0  # seconds that copies which were killed may take to die, all together


def run_in_processes(
    tasks: Iterable[T],
    stream: Stream[T, R],
    *,
    jobs: int,
    processes: int = 0,
    executor: Executor | None = None,
    counter: Counter = NULL,
) -> Iterator[R]:
    """Yield what `stream` makes of all tasks, in the order in which it is made.

    The first failure ends every copy and is raised here; so does closing the iterator.

    Args:
        tasks: independent; going through them changes nothing.
        stream: takes a task when it begins one. What it makes can be pickled.
        jobs: number of threads, where this process does it.
        processes: number of copies of this process that may do it instead, by one thread each.
        executor: where `stream` carries them out instead: then there are no copies.
        counter: what a copy counts comes here.

    Raises:
        NoResourceError: a copy was killed, as by a system that is out of memory.
        Exception: whatever `stream` or going through the tasks raises.
    """
    rest = iter(tasks)
    first = list(islice(rest, processes if executor is None else 0))
    tasks = chain(first, rest)
    # More may be held now than when the number of copies was computed.
    processes = min(len(first), (budget() - held()) // own_of_a_copy())
    if processes < 2 or not are_safe():
        yield from stream(tasks, counter, jobs)
        return
    _load()
    crew: list[_Copy] = []
    try:
        with _uninterrupted() as mask:
            for _ in range(processes):
                try:
                    crew.append(_Copy(tasks, stream, processes, [one.line for one in crew], mask))
                except OSError:  # the system makes no more: fewer do the same work
                    break
        if crew:
            yield from _answers(crew, counter)
    finally:
        for one in crew:
            one.kill()
        until = time.monotonic() + _END
        for one in crew:
            one.bury(until)
    if not crew:
        yield from stream(tasks, counter, jobs)


def _load() -> None:
    """Import what copies decode and digest with, while there is one process to do it."""
    for name in _LIBRARIES:
        with suppress(ImportError):  # who needs it says so
            import_module(name)


def pays(largest: int, total: int, jobs: int) -> bool:
    """Say whether copies do no less than `jobs` threads, where one task cannot be divided.

    Args:
        largest: size of the largest task, as long as which it takes at least.
        total: of all tasks.
        jobs: number of threads, among which the largest one is divided.
    """
    return 3 * largest * min(jobs, MOST_THREADS) <= 4 * total  # two do what 1.4 to 1.7 would alone


def are_safe() -> bool:
    """Say whether a copy of this process would be whole.

    A copy has only the thread that made it, and locks that others held stay locked for ever. Of
    torch's own threads nothing is known here.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    if find_spec("_ctypes") is None:  # a copy could not ask to be ended with the first process
        return False
    # Those of `engine.run` have been told to end.
    until = time.monotonic() + _PATIENCE
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))
    return len(sys._current_frames()) == 1


@contextmanager
def _uninterrupted() -> Iterator[Iterable[int]]:
    """Let interruptions wait while copies are made; give the signals that waited before.

    One that came before a copy ignores it would be told by both, and one that came before a copy is
    known would leave it behind.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_FIRST)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Copy:
    """One copy, as the first process knows it.

    Args:
        tasks: see `run`.
        stream: see `run`.
        processes: how many there will be.
        lines: to the copies made before: not this one's matter.
        mask: the signals that it will have blocked.

    Attributes:
        line: to it.

    Raises:
        OSError: the system makes no more.
    """

    def __init__(
        self,
        tasks: Iterable[Any],
        stream: Stream[Any, Any],
        processes: int,
        lines: Sequence[Connection],
        mask: Iterable[int],
    ) -> None:
        from multiprocessing import Pipe

        parent = os.getpid()
        self.line, theirs = Pipe()
        try:
            with warnings.catch_warnings():
                # Of threads that a library of C has and ends before a fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.number = os.fork()
            if not self.number:
                try:
                    for line in (*lines, self.line):
                        line.close()
                    gc.freeze()  # looking for garbage would make pages of all that was shared
                    divide(processes)
                    live(parent, theirs, tasks, stream, mask)
                finally:
                    os._exit(ExitCode.NO_RESOURCE)  # not even that could be done
        except OSError:
            self.line.close()
            raise
        finally:
            theirs.close()
        self._status: int | None = None

    def kill(self) -> None:
        """Let it do nothing more."""
        with suppress(ProcessLookupError):
            if self._status is None:
                os.kill(self.number, signal.SIGKILL)

    def bury(self, until: float) -> int | None:
        """Return its wait status; None where it does not die, as one that hangs in the kernel."""
        while self._status is None:
            try:
                number, status = os.waitpid(self.number, os.WNOHANG)
            except ChildProcessError:
                # The system buries the children of who ignores SIGCHLD. One that was not killed
                # would have said something.
                number, status = self.number, signal.SIGKILL
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
                if said == NEXT:
                    one.line.send(number)
                    number += 1
            except (EOFError, OSError):
                raise _died(one.bury(time.monotonic() + _END)) from None
            if said == COUNTED:
                counter.add(value)
            elif said == MADE:
                yield value
            elif said == FAILED:
                raise value
            elif said == DONE:
                del working[one.line]


def _died(status: int | None) -> Exception:
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGKILL, ExitCode.NO_RESOURCE):
        return NoResourceError(
            "a process that did a part of the work was killed, as by a system without memory",
            hint="run it again with --jobs 1, or with less --max-memory",
        )
    return RuntimeError(f"a process that did a part of the work has ended by itself ({code})")
