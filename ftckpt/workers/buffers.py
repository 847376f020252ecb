"""One read buffer a thread, made once and used again.

Fresh memory costs more than reading into it: the kernel must clear every page first. A megabyte
is large enough that the cost of a call vanishes and small enough to stay in the processor's cache
between the copy out of the page cache and the sum over it.

Buffers begin with a page: into memory that begins sixteen bytes after one, as the allocator gives
it, the kernel copied a quarter slower (AMD EPYC with fast short `rep movsb`).
"""

from __future__ import annotations

import mmap
import threading

_thread = threading.local()


def buffer(nbytes: int, slot: int = 0) -> memoryview:
    """Return `nbytes` of this thread's memory; the next call with the same slot returns it again.

    Args:
        nbytes: how much is needed.
        slot: tells buffers apart that one thread needs at the same time.
    """
    slots: dict[int, mmap.mmap] | None = getattr(_thread, "slots", None)
    if slots is None:
        slots = _thread.slots = {}
    held = slots.get(slot)
    if held is None or len(held) < nbytes:
        held = slots[slot] = mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(held)[:nbytes]


def same(one: memoryview, other: memoryview) -> bool:
    """Say whether two buffers of one length hold the same bytes, as fast as memory is read.

    Comparing two views directly is byte by byte in the interpreter.
    """
    import numpy as np

    words = len(one) // 8
    fits = np.frombuffer(one, np.uint64, words), np.frombuffer(other, np.uint64, words)
    return np.array_equal(*fits) and one[8 * words :] == other[8 * words :]
