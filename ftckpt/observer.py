"""What an operation tells while it runs: to a screen, or to a caller in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from .progress import NULL, Counter

if TYPE_CHECKING:
    from .findings import Finding

T = TypeVar("T")


class Observer:
    """Is told what an operation does, as soon as it is known; this one tells nobody.

    Subclasses override what they want to hear. Every method may be called before an operation
    fails, so that what was known is known all the same.
    """

    def __init__(self, counter: Counter = NULL) -> None:
        self._counter = counter

    @property
    def counter(self) -> Counter:
        """Counts the work."""
        return self._counter

    @property
    def output(self) -> int | None:
        """Where a program prints that the operation starts; None for the stdout of this one."""
        return None

    def begin(self, url: str) -> None:
        """The next checkpoint of a root is `url`."""

    def open(self, url: str, name: str) -> None:
        """A checkpoint of the format `name` is being opened, or is open."""

    def found(self, one: Finding) -> None:
        """A finding, as it is made."""

    def end(self, report: Any) -> None:
        """One of several checkpoints is done, or the plan is made; `report` is the operation's."""

    def note(self, text: str) -> None:
        """A remark: which checkpoint of a root was taken."""

    def warn(self, text: str) -> None:
        """What a user must see: a newer checkpoint is not committed."""

    def report(self, **fields: Any) -> None:
        """Fields of the answer that are known already."""

    def keep(self, thing: T) -> T:
        """Something large was made that is held until the end; returns it."""
        return thing


SILENT = Observer()
