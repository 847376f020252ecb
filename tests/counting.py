"""A counter that adds up what it is told."""

from __future__ import annotations

from ftckpt.progress import Counter


class Added(Counter):
    """The units of all stages, said before and done."""

    def __init__(self) -> None:
        self.total = self.done = 0

    def start(self, label: str, total: int | None, unit: str = "B") -> None:
        self.total += total or 0

    def add(self, amount: int) -> None:
        self.done += amount
