"""Decide how many threads or processes compare within the memory limit."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.decoding_processes import for_reading
from ftckpt.errors import FtckptError
from ftckpt.storage.chunks import LOCAL, REMOTE
from ftckpt.storage.prefetch import most_kept
from ftckpt.transfer.read.elements import SPAN
from ftckpt.workers.budget import thread_count

# What numpy and the modules of the comparison take when they are imported: measured at 19 MiB.
_IMPORTS = 20 << 20


def affordable_jobs(jobs: int, sides: Sequence[Checkpoint]) -> int:
    """Return how many of `jobs` threads fit into the memory budget beside what is held already.

    A thread holds a block of each side, a span out of which elements are picked, and what its
    arithmetic takes; where a side lies behind a latency, blocks and spans are larger, and the
    answer to a request is held too. One thread always may. What is held is the whole process, with
    its libraries and those that are still to be imported.

    Args:
        jobs: how many are wanted.
        sides: the checkpoints that are compared.
    """
    stores = [one.source.store for one in sides]
    near = all(store.traits.local for store in stores)
    each = 4 * LOCAL + SPAN if near else 4 * REMOTE
    imports = 0 if "numpy" in sys.modules else _IMPORTS
    return thread_count(
        jobs,
        each,
        reserved=imports + sum(map(most_kept, stores)),
        decoding=any(one.format == "delta" for one in sides),
        mapped=True,
    )


def affordable_processes(jobs: int, sides: Sequence[Checkpoint]) -> int:
    """Return how many copies of this process compare faster than `jobs` threads; 0 for none.

    They do where a side is decoded, and both lie on this machine.

    Args:
        jobs: how many threads fit into the memory budget.
        sides: the checkpoints that are compared.
    """
    try:
        if not all(one.is_local() for one in sides):
            return 0
        decoded = [one for one in sides if one.decode_slots()]
    except FtckptError:  # what is read of it says what it is
        return 0
    each = 4 * LOCAL + SPAN
    return min((for_reading(one, jobs, each) for one in decoded), default=0)
