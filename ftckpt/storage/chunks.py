"""Read a range of a file in chunks, into one buffer per thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ftckpt.workers.buffers import buffer

if TYPE_CHECKING:
    from ftckpt.workers.limits import RateLimit

    from .store import Opens, Reader

LOCAL = 1 << 20
REMOTE = 8 << 20  # a request has a latency to hide
_FOLIO = 128 << 10


def size_for(store: Opens) -> int:
    """Return the buffer size that suits a store."""
    return LOCAL if store.traits.local else REMOTE


def chunks(
    reader: Reader,
    offset: int,
    length: int,
    *,
    size: int = LOCAL,
    limiter: RateLimit | None = None,
    slot: int = 0,
) -> Iterator[memoryview]:
    """Yield the bytes of a range in order; each view is valid until the next one.

    Raises:
        TruncatedError: the object ends inside the range.
    """
    end = offset + length
    view = buffer(min(size, length), slot) if length else memoryview(b"")
    while offset < end:
        # Cold reads are half as fast if they begin inside a folio of the page cache.
        part = view[: min(end - offset, len(view) - offset % min(_FOLIO, len(view)))]
        if limiter is not None:
            limiter.take(len(part))
        reader.readinto(offset, part)
        yield part
        offset += len(part)
