"""Plan ranged reads: few requests for many small extents, several for a large one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ftckpt.extents import Extent
from ftckpt.workers.budget import budget

PART = 8 << 20
"""Bytes of one request: large enough to fill a link, small enough to repeat (measured on S3)."""


_SHARE = 16  # of the budget, as a divisor: bytes that are on their way for one question


class Want(NamedTuple):
    """One asked-for extent inside a run: its index in the question, its place in the run."""

    asked: int
    start: int
    length: int


class MergedRange(NamedTuple):
    """One stretch of a file that is read together, and the extents that it answers."""

    file: str
    offset: int
    length: int
    wants: list[Want]


def plan_runs(extents: Sequence[Extent], gap: int, limit: int = PART) -> list[MergedRange]:
    """Group extents into runs.

    Args:
        extents: in any order; they may overlap; empty ones need no reading and are left out.
        gap: extents of one file with at most this many bytes between them are read together.
        limit: a run grows no further once it holds this many bytes.

    Returns:
        Runs that cover each non-empty extent exactly once.
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
    """Yield runs that may be read at once in the memory that is allowed, one at least.

    What is picked out of long runs may be little, so that what is read must be bounded by itself.
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
