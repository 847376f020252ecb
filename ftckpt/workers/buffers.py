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
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftckpt.storage.store import Opens, Reader

    from .limits import RateLimit

LOCAL = 1 << 20
REMOTE = 8 << 20  # a request has a latency to hide
_FOLIO = 128 << 10

_thread = threading.local()


def size_for(store: Opens) -> int:
    """Return the buffer size that suits a store."""
    return LOCAL if store.traits.local else REMOTE


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


def chunks(
    reader: Reader,
    offset: int,
    length: int,
    *,
    size: int = LOCAL,
    limiter: RateLimit | None = None,
    slot: int = 0,
) -> Iterator[memoryview]:
    """Yield the bytes of a range in order, each view valid until the next is asked for.

    Raises:
        TruncatedError: the object ends inside the range.
    """
    end = offset + length
    view = buffer(min(size, length), slot) if length else memoryview(b"")
    while offset < end:
        # Cold reads are half as fast where they begin inside a folio of the page cache.
        part = view[: min(end - offset, len(view) - offset % min(_FOLIO, len(view)))]
        if limiter is not None:
            limiter.take(len(part))
        reader.readinto(offset, part)
        yield part
        offset += len(part)
