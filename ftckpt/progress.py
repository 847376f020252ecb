"""The counter that the core counts on and never draws."""

from __future__ import annotations

from typing import Protocol


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
