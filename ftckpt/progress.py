"""The counter that the core counts on and never draws."""

from __future__ import annotations

import signal
from typing import Protocol, runtime_checkable

# By these a user asks a process how far it is: SIGINFO is Ctrl-T on BSD and macOS.
ASKING = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGINFO") if hasattr(signal, name))


class Counter(Protocol):
    """Receives amounts of work; every method may be called from any thread."""

    def start(self, label: str, total: int | None, unit: str = "B") -> None:
        """Begin a stage of `total` units (None when not known); a new stage ends the last."""

    def add(self, amount: int) -> None:
        """Count `amount` more units of the current stage."""


class NullCounter:
    """Counts nothing: the default everywhere."""

    def start(self, label: str, total: int | None, unit: str = "B") -> None:
        """Ignore the stage."""

    def add(self, amount: int) -> None:
        """Ignore the amount."""


NULL = NullCounter()


@runtime_checkable
class FileCounter(Protocol):
    """What a counter has too that counts files: most count amounts alone."""

    def files(self, total: int) -> None:
        """Say of how many files the current stage is."""

    def file_done(self) -> None:
        """Count one more file of the current stage that is done."""


def expect_files(counter: Counter, total: int) -> None:
    """Say to a counter of files of how many the current stage is."""
    if isinstance(counter, FileCounter):
        counter.files(total)


def count_file(counter: Counter) -> None:
    """Count one more file that is done, where the counter counts files."""
    if isinstance(counter, FileCounter):
        counter.file_done()
