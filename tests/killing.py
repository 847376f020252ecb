"""Kill a process at its k-th change of the filesystem, k = 1, 2, 3 … until it gets through.

The process is a fork whose system calls that change anything are counted; at the chosen one it ends
as by `kill -9`: nothing is flushed, no handler runs. A write is cut in half first, because a real
kill can fall there too.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Generator
from typing import Any

from ftckpt.storage.local import renaming

_CHANGES = (
    "open", "write", "pwrite", "ftruncate", "rename", "link", "unlink", "rmdir", "mkdir", "fsync",
)  # fmt: skip
KILLED = 137


def kill_points(work: Callable[[], object], *, limit: int = 2000) -> Generator[int, None, None]:
    """Run `work` in forks, killed at change 1, 2, 3 …; yield after each kill; end when it is done.

    Raises:
        AssertionError: a run ended by itself with a failure, or `limit` was not enough.
    """
    for point in range(1, limit):
        if run_until(work, point) == 0:
            return
        yield point
    raise AssertionError(f"it was not done after {limit} changes")


def run_until(work: Callable[[], object], point: int) -> int:
    """Run `work` in a fork, killed at change `point`; return `KILLED`, or 0 where it got through.

    Raises:
        AssertionError: it ended by itself with a failure.
    """
    child = os.fork()
    if child == 0:
        _run(work, point)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, KILLED), f"the run to be killed at change {point} ended with {code}"
    return code


def _run(work: Callable[[], object], point: int) -> None:
    left = point
    lock = threading.Lock()

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if name == "open" and not args[1] & (os.O_CREAT | os.O_TRUNC):
                return real(*args, **kwargs)
            with lock:
                left -= 1
                if left == 0:
                    if name in ("write", "pwrite"):
                        real(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
                    os._exit(KILLED)
            return real(*args, **kwargs)

        return call

    gc.disable()  # it would touch every page that the fork shares
    try:
        for name in _CHANGES:
            setattr(os, name, counted(name, getattr(os, name)))
        renaming.renameat2 = counted("rename", renaming.renameat2)
        work()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)
