"""Plan ranged reads: few requests for many small extents, several for a large one.

Read a range of a file in chunks, into one buffer per thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.extents import Extent
from ftckpt.workers.budget import budget
from ftckpt.workers.buffers import buffer

if TYPE_CHECKING:
    from ftckpt.workers.limits import RateLimit

    from .store import Opens, Reader


PART = 8 << 20
"""Bytes of one request: large enough to fill a link, small enough to repeat (measured on S3)."""


_SHARE = 16  # divisor of the budget: bytes in flight for one call


class Want(NamedTuple):
    """One requested extent in a run: its index in the request, its place in the run."""

    asked: int
    start: int
    length: int


class MergedRange(NamedTuple):
    """One stretch of a file that is read together, and the extents in it."""

    file: str
    offset: int
    length: int
    wants: list[Want]


def plan_runs(extents: Sequence[Extent], gap: int, limit: int = PART) -> list[MergedRange]:
    """Group extents into runs that cover each non-empty extent exactly once.

    Args:
        extents: in any order; they may overlap; empty ones are left out.
        gap: extents of one file with at most this many bytes between them are read together.
        limit: a run stops growing once it holds this many bytes.
    """
    order = sorted(range(len(extents)), key=lambda i: extents[i])
    runs: list[MergedRange] = []
    for i in order:
        file, offset, length = extents[i]
        if not length:
            continue
        if runs:
            last = runs[-1]
            end = last.offset + last.length
            grown = max(end, offset + length) - last.offset
            inside = offset + length <= end
            if file == last.file and (inside or (offset <= end + gap and grown <= limit)):
                last.wants.append(Want(i, offset - last.offset, length))
                runs[-1] = last._replace(length=grown)
                continue
        runs.append(MergedRange(file, offset, length, [Want(i, 0, length)]))
    return runs


def waves(runs: Iterable[MergedRange]) -> Iterator[list[MergedRange]]:
    """Yield runs that may be read at once within the memory limit, at least one.

    Long runs may hold few wanted bytes, so the bytes read are bounded by themselves.
    """
    most = budget() // _SHARE
    wave: list[MergedRange] = []
    nbytes = 0
    for run in runs:
        if wave and nbytes + run.length > most:
            yield wave
            wave, nbytes = [], 0
        wave.append(run)
        nbytes += run.length
    if wave:
        yield wave


def split_parts(offset: int, length: int, part: int = PART) -> list[tuple[int, int]]:
    """Return (offset, length) of consecutive parts of at most `part` bytes."""
    end = offset + length
    return [(start, min(part, end - start)) for start in range(offset, end, part)]


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
