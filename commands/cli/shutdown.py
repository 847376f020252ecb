"""How the process ends: signals, time limits, and leaving while something hangs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from ftckpt.errors import ExitCode
from ftckpt.progress import ASKING

from . import watchdog

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
        watchdog.once(number)
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
