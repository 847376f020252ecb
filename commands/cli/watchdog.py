"""End the process after a signal even where C code keeps the interpreter: from another process.

A handler of Python runs between two instructions of the interpreter. Inside one long call of C code
that holds the interpreter's lock neither a handler nor a thread ever runs. What does run is the
system's: the C half of the handler writes the signal's number into a pipe. A small copy of this
process, made before any file is opened, waits at the other end. Where the process has not ended in
time, the copy says the last words and lets the signal do what it does by default.

The default action needs a handler that takes itself away when it is called (SA_RESETHAND), which
Python's `signal` cannot ask for: the C library's `sysv_signal` can. Where that is missing, the last
resort is SIGKILL, with its own exit status.

How the process ends: signals, time limits, and leaving while something hangs.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from ftckpt.errors import ExitCode
from ftckpt.progress import ASKING

# After the process's own attempt (`ending.GRACE`), and before the two seconds are over.
PATIENCE = 1.7
# A handler that is called more often is not taken away when it is called: another C library.
_HANDLED = 4
# Seconds for the delivery. A process that does not run in all that time does not end by SIGKILL
# either, and where it runs it takes some milliseconds.
_DELIVERY = 5.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)

_is_watched = False


def start(last_words: Callable[[int], None]) -> None:
    """Make the copy; where the system refuses one, signals work as far as Python lets them.

    Call it from the main thread, before other threads begin and after the handlers are set.

    Args:
        last_words: called in the copy with the signal's number before it ends this process.
    """
    if not hasattr(os, "fork") or not hasattr(signal, "pthread_sigmask"):
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    parent = os.getpid()
    # The terminal signals the whole group, and the copy must outlive what it watches.
    spared = (*SIGNALS, signal.SIGHUP, signal.SIGTSTP, *ASKING)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, spared)
    try:
        child = os.fork()
        if child == 0:
            os.close(writing)
            _watch(reading, parent, last_words)
    except OSError:  # no more processes: the work does not need this one
        os.close(writing)
        return
    finally:
        os.close(reading)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    global _is_watched  # one copy a process
    _is_watched = True
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in SIGNALS:
        once(number)


def once(number: int) -> None:
    """Let the handler of a signal be called once; the next signal ends the process by default."""
    if not _is_watched or signal.getsignal(number) in (signal.SIG_IGN, signal.SIG_DFL, None):
        return
    import ctypes

    try:
        library = ctypes.CDLL(None)
        library.signal.restype = ctypes.c_void_p
        library.sysv_signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        handler = library.signal(number, None)
        library.sysv_signal(number, handler)
    except (AttributeError, OSError):  # another C library
        return


def _watch(reading: int, parent: int, last_words: Callable[[int], None]) -> NoReturn:
    """Wait until the process at the other end of the pipe ends, or is told to."""
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        while True:
            told = os.read(reading, 64)
            if not told:
                break
            number = next((n for n in told if n in SIGNALS), 0)
            if number and not _ended(reading, parent, PATIENCE):
                last_words(number)
                _end(parent, number, reading)
                break
    except OSError:
        pass
    finally:
        os._exit(0)


def _end(parent: int, number: int, reading: int) -> None:
    """End the process by the signal, or by SIGKILL where that finds a handler every time.

    The first one or two may still find a handler, which is taken away by that. A signal that is
    pending swallows the next one, and a busy machine takes its time to deliver it, so that what
    counts is how often the handler was called: it writes the number into the pipe.
    """
    calls, until = 0, time.monotonic() + _DELIVERY
    while calls < _HANDLED and time.monotonic() < until:
        os.kill(parent, number)
        told: list[int] = []
        if _ended(reading, parent, 0.005, told):
            return
        calls += told.count(number)
    os.kill(parent, signal.SIGKILL)


def _ended(reading: int, parent: int, seconds: float, told: list[int] | None = None) -> bool:
    """Wait for the end of the process, so long at most; add to `told` the signals it handles."""
    until = time.monotonic() + seconds
    while os.getppid() == parent:
        left = until - time.monotonic()
        if left <= 0:
            return False
        # Copies of the process hold the pipe open, too: its end alone does not tell.
        if select.select([reading], [], [], min(left, 0.05))[0]:
            numbers = os.read(reading, 64)
            if not numbers:
                return True
            if told is not None:
                told += numbers
    return True


# A signal must end the process within two seconds; what is left after this is for the output.
GRACE = 1.5


class SignalError(BaseException):
    """A signal asked the process to end; not an Exception, so that nothing swallows it."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__(code)
        self.code = code

    @property
    def message(self) -> str:
        """What happened, as one sentence."""
        return "interrupted" if self.code is ExitCode.INTERRUPTED else "terminated"


@contextmanager
def signals_caught(last_words: Callable[[ExitCode], None]) -> Iterator[None]:
    """Make SIGINT and SIGTERM raise SignalError in the main thread, and end it when that hangs.

    At the end of the block the handlers are again what they were.

    Unwinding can wait for ever: an executor joins threads that sit in a dead network call. So the
    first signal also sets a timer that leaves without unwinding; a second signal leaves at once.
    What keeps the interpreter itself is for the `watchdog`.

    Args:
        last_words: called with the exit code before leaving without unwinding.
    """
    caught: list[ExitCode] = []

    def give_up(number: int = 0, frame: FrameType | None = None) -> None:
        last_words(caught[0])
        leave(caught[0])

    def ask(number: int, frame: FrameType | None) -> None:
        if caught:
            give_up()
        interrupted = number == signal.SIGINT
        caught.append(ExitCode.INTERRUPTED if interrupted else ExitCode.TERMINATED)
        signal.signal(number, ask)  # it may have been taken away when it was called
        once(number)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, GRACE)
        raise SignalError(caught[0])

    def notice(unraisable: sys.UnraisableHookArgs) -> None:
        # Raised in a callback or a finalizer, it is dropped there and nothing unwinds.
        if isinstance(unraisable.exc_value, SignalError):
            give_up()
        others(unraisable)

    others, sys.unraisablehook = sys.unraisablehook, notice
    before = {}
    try:
        if hasattr(signal, "SIGALRM"):
            before[signal.SIGALRM] = signal.signal(signal.SIGALRM, give_up)
        for number in (signal.SIGINT, signal.SIGTERM):
            # A parent that ignores a signal (nohup, a background job of a script) means it.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, ask)
        yield
    finally:
        if caught and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            if handler is not None:  # None: it was not set by Python, which cannot set it again
                signal.signal(number, handler)
        if sys.unraisablehook is notice:
            sys.unraisablehook = others


def answer_signals(tell: Callable[[], None]) -> None:
    """Call `tell` where a signal asks how far the work is, unless somebody else wants it."""
    for number in ASKING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, frame: tell())


def leave(code: int) -> NoReturn:
    """End the process now, without waiting for threads and without exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError, RuntimeError):
            continue
    os._exit(code)
