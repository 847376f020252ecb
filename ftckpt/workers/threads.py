"""Carry out a list of independent tasks, a bounded number at a time.

Bulk work is always the same shape: many tasks (hash this block, check these records) that are
plain data, do not depend on each other, and may be done twice without harm; and one module-level
function that does one of them. Nothing else is asked of an executor, so threads serve on one
machine and a cluster's `concurrent.futures.Executor` can be passed in where there is one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from ftckpt.errors import NoResourceError

# How long a wait may keep a signal from being handled, in seconds.
_TICK = 0.5

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


def run(
    tasks: Iterable[T],
    work: Callable[[T], R],
    *,
    jobs: int,
    executor: Executor | None = None,
    window: int | None = None,
) -> Iterator[R]:
    """Yield `work(task)` for every task, in the order in which they finish.

    `tasks` is consumed only as fast as work is done: at most `window` tasks are held at a time.
    The first failure cancels what has not begun and is raised here; so does closing the iterator.
    What has begun is not waited for: its threads are daemons, so the process can end at once.

    Args:
        tasks: independent, idempotent, picklable; may be endless.
        work: a module-level function.
        jobs: number of threads, without an `executor`; 1 is honoured.
        executor: where to run instead of own threads; it is not shut down.
        window: tasks in flight or waiting; by default twice `jobs`.

    Raises:
        NoResourceError: not one thread can be started; where some can, they do.
        Exception: whatever `work` or the iteration of `tasks` raises.
    """
    limit = max(1, 2 * jobs if window is None else window)
    pool = DaemonThreads(jobs) if executor is None else executor
    done: SimpleQueue[Future[R]] = SimpleQueue()
    pending: set[Future[R]] = set()

    def finished() -> R:
        # A signal that arrives just before a lock is waited for is seen only when the wait ends.
        while True:
            try:
                future = done.get(timeout=_TICK)
                break
            except Empty:
                continue
        pending.remove(future)
        return future.result()

    try:
        for task in tasks:
            future = pool.submit(work, task)
            pending.add(future)
            future.add_done_callback(done.put)
            while len(pending) >= limit or not done.empty():
                yield finished()
        while pending:
            yield finished()
    finally:
        for future in pending:
            future.cancel()
        if executor is None:
            pool.shutdown(wait=False, cancel_futures=True)


def in_turn(lists: Iterable[Iterable[T]], width: int) -> Iterator[T]:
    """Yield from up to `width` lists a task each in turn, until all are used up; each in its order.

    For lists whose tasks disturb each other: two threads that write one file wait for each other in
    the kernel. A list is begun when one before it has ended.

    Args:
        lists: of tasks; consumed as slowly as possible.
        width: how many are open at a time, 1 or more.
    """
    waiting = iter(lists)
    turns = deque(map(iter, islice(waiting, width)))
    while turns:
        current = turns.popleft()
        try:
            task = next(current)
        except StopIteration:
            turns.extend(map(iter, islice(waiting, 1)))
        else:
            turns.append(current)
            yield task


class DaemonThreads(Executor):
    """Threads that do not keep the process alive.

    `ThreadPoolExecutor` joins its threads when the interpreter ends, so that one read on a dead
    file server would hold up Ctrl-C; these are left behind.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = max(1, jobs)
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._futures: set[Future[Any]] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Schedule one call; see `concurrent.futures.Executor.submit`."""
        future: Future[R] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._closed:
                raise RuntimeError("the executor was shut down")
            self._queue.put(call)
            self._futures.add(future)
            if len(self._threads) < min(self._jobs, len(self._futures)):
                self._start_thread()
        future.add_done_callback(self._forget)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; see `concurrent.futures.Executor.shutdown`."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            waiting = list(self._futures)
        if cancel_futures:
            for future in waiting:
                future.cancel()
            while True:
                try:
                    self._queue.get_nowait()
                except Empty:
                    break
        for _ in threads:
            self._queue.put(None)
        if wait:
            for thread in threads:
                thread.join()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name="ftckpt-worker", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more: fewer do the same work
            if not self._threads:
                raise NoResourceError("this process may not start a single thread") from error
            self._jobs = len(self._threads)
        else:
            self._threads.append(thread)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._futures.discard(future)

    def _serve(self) -> None:
        while (call := self._queue.get()) is not None:
            call()
            del call  # the task must not live on while the thread waits for the next
