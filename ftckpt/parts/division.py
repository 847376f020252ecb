"""Do one share of the tasks, or answer all of them from the records of those who did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from ftckpt.errors import ExitCode, FtckptError, RefusedError

from .check_tasks import dumped, key_of, loaded, part_of
from .shares import WHO_MEETS_IT, Shares

T = TypeVar("T")
R = TypeVar("R")

# What is wrong with a machine says nothing of the checkpoint: another machine tries again.
OF_THE_MACHINE = (ExitCode.UNAVAILABLE, ExitCode.DENIED, ExitCode.NO_RESOURCE, ExitCode.INTERNAL)
# What ends a part and says something of the checkpoint: every other machine would meet it too.
VERDICTS = (ExitCode.CORRUPT, ExitCode.UNSAFE, ExitCode.UNSUPPORTED, ExitCode.UNVERIFIED)


class OwnShare:
    """Does the tasks of one part, and keeps their results.

    Args:
        shares: what each part is.
        number: which part.

    Attributes:
        results: of the tasks that were done, by key, in JSON's types.
    """

    partial = True
    seconds = 0.0

    def __init__(self, shares: Shares, number: int) -> None:
        self.results: dict[str, Any] = {}
        self._shares = shares
        self._number = number

    def run(
        self, tasks: Iterable[T], carry: Callable[[Iterator[T]], Iterator[tuple[str, R]]]
    ) -> Iterator[R]:
        """Yield the results of this part's tasks."""
        for key, result in carry(task for task in tasks if self.takes(task)):
            self.results[key] = dumped(key, result)
            yield result

    def key(self, task: Any) -> str:
        """Return what names a task on every machine."""
        return key_of(task)

    def takes(self, task: Any) -> bool:
        """Say whether a task is this part's."""
        return part_of(task, self._shares) in (self._number, WHO_MEETS_IT)


class FromRecords:
    """Answers tasks from the records of all parts.

    A task that no record has is done here: what a record lacks is never taken for done.

    Args:
        results: of tasks, by key.
        seconds: that all parts took together.

    Attributes:
        seconds: as given.
        done_here: number of tasks that no record had.
    """

    partial = False

    def __init__(self, results: Mapping[str, Any], seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.done_here = 0
        self._results = results

    def run(
        self, tasks: Iterable[T], carry: Callable[[Iterator[T]], Iterator[tuple[str, R]]]
    ) -> Iterator[R]:
        """Yield the results of all tasks."""
        left: list[T] = []
        for task in tasks:
            key = key_of(task)
            if key not in self._results:
                left.append(task)
                continue
            try:
                result = loaded(task, self._results[key])
            except (ValueError, TypeError, KeyError, AttributeError, FtckptError) as error:
                raise RefusedError(
                    f"a record holds a result of {key!r} that is none: {error}",
                    hint="remove the records, and run the parts again",
                ) from None
            yield result
        self.done_here += len(left)
        if left:
            for _, made in carry(iter(left)):
                yield made

    def key(self, task: Any) -> str:
        """Return what names a task on every machine."""
        return key_of(task)

    def takes(self, task: Any) -> bool:
        """Say whether a task is done here."""
        return key_of(task) not in self._results
