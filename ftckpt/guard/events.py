"""What reaches the main loop of a guard: signals, and what its threads tell it."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

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
