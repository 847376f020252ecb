"""Kill a process at its k-th change of the filesystem, k = 1, 3, 5, 8 … until it gets through.

Every k is for `--campaign full`. What is short takes steps of 2, 2 and 3 in turn: neighbours are
mostly writes of one loop, and seven is a multiple of no loop's length, so that each of its lines is
fallen on in some round.

The process is a fork whose system calls that change anything are counted; at the chosen one it ends
as by `kill -9`: nothing is flushed, no handler runs. A write is cut in half first, because a real
kill can fall there too.
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Callable, Generator
from typing import Any

from ftckpt.storage.local import folders
from tests import campaign

_CHANGES = (
    "open", "write", "pwrite", "ftruncate", "rename", "link", "unlink", "rmdir", "mkdir", "fsync",
)  # fmt: skip
KILLED = 137
_STEPS, _EACH = (2, 2, 3), (1,)


def kill_points(
    work: Callable[[], object], *, each: bool = False, limit: int = 2000
) -> Generator[int, None, None]:
    """Run `work` in forks, killed at change 1, 3, 5 …; yield after each kill; end when it is done.

    Args:
        work: what is killed.
        each: kill at every change, as where one run goes on from where the last was killed.
        limit: how many changes may be needed.

    Raises:
        AssertionError: a run ended by itself with a failure, or `limit` was not enough.
    """
    point = 1
    for step in itertools.cycle(_EACH if each or campaign.examples(0, 1) else _STEPS):
        if point >= limit:
            break
        if run_until(work, point) == 0:
            return
        yield point
        point += step
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
        folders.renameat2 = counted("rename", folders.renameat2)
        work()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)
