"""Who does bulk work, how fast, and who is told of its progress: threads or processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ftckpt import amounts
from ftckpt.progress import NULL, Counter

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from .limits import RateLimit
    from .processes import Stream

T = TypeVar("T")
R = TypeVar("R")


class Division(Protocol):
    """A division of one operation's tasks among machines (`ftckpt.parts`).

    Attributes:
        partial: whether only a share of the tasks is done here, so that no verdict on the whole
            follows from the results.
        seconds: that other machines took for what is answered here without doing it.
    """

    partial: bool
    seconds: float

    def run(
        self, tasks: Iterable[T], carry: Callable[[Iterator[T]], Iterator[tuple[str, R]]]
    ) -> Iterator[R]:
        """Yield the results of tasks that are done here, or that were done elsewhere.

        Args:
            tasks: of the whole operation.
            carry: does those of them that are given, and yields the key and result of each.
        """

    def key(self, task: Any) -> str:
        """Return what names a task on every machine."""

    def takes(self, task: Any) -> bool:
        """Say whether a task is done here."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """How an operation carries out its tasks.

    Attributes:
        threads: number of threads.
        processes: number of copies of this process that do most of it instead, where there can be
            any (`ftckpt.workers.processes`): a gain where the tasks keep processors busy.
        executor: where to run instead of either; it must begin tasks in the order of submission.
        limiter: bounds the rate of reading.
        counter: is told what is done.
        division: whose share of the tasks is done here; None: all of them.
    """

    threads: int = 1
    processes: int = 0
    executor: Executor | None = None
    limiter: RateLimit | None = None
    counter: Counter = NULL
    division: Division | None = None

    @property
    def partial(self) -> bool:
        """Whether only a share of the tasks is done here."""
        return self.division is not None and self.division.partial

    @classmethod
    def of(cls, jobs: int = 0, rate: amounts.Rate = "", counter: Counter = NULL) -> Work:
        """Return what a user asks for.

        Args:
            jobs: number of threads, and at most of processes; 0 for one a processor.
            rate: bytes a second, or a text such as "200MiB/s"; 0 and "" for no limit.
            counter: is told what is done.

        Raises:
            UsageError: the text is not a rate.
        """
        from . import limits

        number = amounts.rate(rate)
        limiter = limits.RateLimit(number) if number else None
        count = jobs or limits.jobs()
        return cls(threads=count, processes=count, limiter=limiter, counter=counter)

    def run(
        self, tasks: Iterable[T], do: Callable[[T], R], *, window: int | None = None
    ) -> Iterator[R]:
        """Yield `do(task)` for every task, by threads; see `threads.run`."""
        from . import threads

        division = self.division
        if division is None:
            return threads.run(tasks, do, jobs=self.threads, executor=self.executor, window=window)

        def carry(share: Iterator[T]) -> Iterator[tuple[str, R]]:
            return threads.run(
                share, lambda task: (division.key(task), do(task)),
                jobs=self.threads, window=window,
            )  # fmt: skip

        return division.run(tasks, carry)

    def each(self, tasks: Iterable[T], do: Callable[[T], R]) -> Iterator[R]:
        """Yield `do(task)` for every task, one after the other, in their order."""
        division = self.division
        if division is None:
            return map(do, tasks)
        return division.run(tasks, lambda share: ((division.key(one), do(one)) for one in share))

    def spread(self, tasks: Iterable[T], do: Callable[[T, Counter], R]) -> Iterator[R]:
        """Yield `do(task, counter)` for every task, by processes where there can be any.

        Args:
            tasks: see `processes.run_in_processes`.
            do: does one of them. It counts what it does by the counter that it is given, and what
                it returns can be pickled.
        """
        from . import threads

        division = self.division
        if division is not None:

            def carry(share: Iterator[T]) -> Iterator[tuple[str, R]]:
                alone = replace(self, division=None)
                return alone.spread(
                    share, lambda task, counter: (division.key(task), do(task, counter))
                )

            return division.run(tasks, carry)

        def stream(tasks: Iterator[T], counter: Counter, jobs: int) -> Iterator[R]:
            return threads.run(
                tasks, lambda task: do(task, counter), jobs=jobs, executor=self.executor
            )

        return self.streamed(tasks, stream)

    def streamed(self, tasks: Iterable[T], stream: Stream[T, R]) -> Iterator[R]:
        """Yield what `stream` makes of all tasks; see `processes.run_in_processes`."""
        from .processes import run_in_processes

        return run_in_processes(
            tasks, stream, jobs=self.threads, processes=self.processes,
            executor=self.executor, counter=self.counter,
        )  # fmt: skip


# One thread, unlimited, that tells nobody.
ALONE = Work()
