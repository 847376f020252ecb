"""Decide how many threads or processes compare within the memory limit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.decoding_processes import for_reading
from ftckpt.errors import FtckptError
from ftckpt.storage.chunks import LOCAL, REMOTE
from ftckpt.storage.prefetch import most_kept
from ftckpt.transfer.read.elements import SPAN
from ftckpt.workers import Work
from ftckpt.workers.budget import thread_count

# What numpy and the modules of the comparison take when they are imported: measured at 19 MiB.
_IMPORTS = 20 << 20


def within_budget(work: Work, sides: Sequence[Checkpoint]) -> Work:
    """Return the same work by as many threads and processes as fit into the memory budget.

    A thread holds a block of each side, a span out of which elements are picked, and what its
    arithmetic takes; where a side lies behind a latency, blocks and spans are larger, and the
    answer to a request is held too. One thread always may. What is held is the whole process, with
    its libraries and those that are still to be imported.

    Args:
        work: as many as are wanted.
        sides: the checkpoints that are compared.
    """
    stores = [one.source.store for one in sides]
    near = all(store.traits.local for store in stores)
    imports = 0 if "numpy" in sys.modules else _IMPORTS
    threads = thread_count(
        work.threads,
        4 * LOCAL + SPAN if near else 4 * REMOTE,
        reserved=imports + sum(map(most_kept, stores)),
        decoding=any(bool(one.decoding) for one in sides),
        mapped=True,
    )
    processes = 0 if work.limiter is not None else _processes(threads, sides)
    return replace(work, threads=threads, processes=processes)


def _processes(threads: int, sides: Sequence[Checkpoint]) -> int:
    """Return how many copies of this process compare faster than the threads; 0 for none.

    They do where a side is decoded, and both lie on this machine.
    """
    try:
        if not all(one.is_local() for one in sides):
            return 0
        decoded = [one for one in sides if one.decoding.slots()]
    except FtckptError:  # what is read of it says what it is
        return 0
    each = 4 * LOCAL + SPAN
    return min((for_reading(one, threads, each) for one in decoded), default=0)
