"""List what a transfer would do: every copy, and its cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ftckpt.checkpoint import Box, Checkpoint
from ftckpt.checkpoint.read_ahead import for_reading
from ftckpt.extents import BLOCK
from ftckpt.storage.prefetch import most_kept
from ftckpt.storage.store import Store
from ftckpt.transfer.layout import Elements, Layout, OutputFile, Stored
from ftckpt.transfer.read.elements import REMOTE, SPAN, Gatherer
from ftckpt.workers.budget import demand, thread_count

_BASE = 64 << 20  # the interpreter, numpy, and the index of a checkpoint of ordinary size
_SAMPLE = 64 << 20


class BoxCopy(NamedTuple):
    """One box of a source tensor that goes into one place of a file.

    Attributes:
        file: of the result.
        key: of the source's tensor.
        source: the box in it.
        local: the box in the tensor that the file holds.
        nbytes: of the result.
        cast: the type it becomes, "" where it stays.
    """

    file: str
    key: str
    source: Box
    local: Box
    nbytes: int
    cast: str = ""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file of the result.

    Attributes:
        path: relative to the destination.
        nbytes: its size.
        copies: how many boxes of tensors it takes.
    """

    path: str
    nbytes: int
    copies: int


@dataclass(frozen=True)
class Planned:
    """A transfer before it is carried out.

    Attributes:
        files: in the order in which they are made.
        nbytes: of all of them.
        memory: bytes that carrying it out holds at most, by estimate.
        seconds: how long it takes, by the rate at which the source was just read; None where
            there was nothing to read.
    """

    files: Sequence[PlannedFile]
    nbytes: int
    memory: int
    seconds: float | None


def box_copies(layout: Layout, checkpoint: Checkpoint) -> Iterator[BoxCopy]:
    """Yield every copy of a layout, file by file; a shard that is cut over segments comes once."""
    for file in layout.files:
        yield from _of_file(file, checkpoint)


def affordable_jobs(jobs: int, *, local: bool, source: Store | None = None) -> int:
    """Return how many of `jobs` threads fit into the memory budget beside what is held already.

    Args:
        jobs: how many are wanted.
        local: whether the destination is on this machine.
        source: where the source lies, if its tensors are read piece by piece.

    Raises:
        NoResourceError: the budget is less than one thread needs.
    """
    each, ahead = _thread_memory(local, source), 0 if source is None else most_kept(source)
    demand(_BASE + each, "a transfer by one thread")
    return thread_count(jobs, each, reserved=ahead)


def affordable_processes(jobs: int, checkpoint: Checkpoint) -> int:
    """Return how many copies of this process read a source faster than `jobs` threads; 0 for none.

    Args:
        jobs: how many threads fit into the memory budget.
        checkpoint: the source.

    Raises:
        FtckptError: what its tensors are decoded from cannot be opened.
    """
    return for_reading(checkpoint, jobs, _thread_memory(True, checkpoint.source.store))


def planned(
    layout: Layout, checkpoint: Checkpoint, *, jobs: int, proof: bool, local: bool = True
) -> Planned:
    """Say what carrying out a layout would make and cost.

    Args:
        layout: what would be made.
        checkpoint: the source; up to 64 MiB of its largest file are read for the estimate of time.
        jobs: number of threads.
        proof: whether the result would be read back.
        local: whether the destination is on this machine.
    """
    files = [
        PlannedFile(file.path, file.size, sum(1 for _ in _of_file(file, checkpoint)))
        for file in (*layout.files, *layout.commit)
    ]
    rate = _reading_rate(checkpoint)
    # All is read and written once, and read back once where it is proven. What is decoded then is
    # read once more.
    passes = 2 + (proof and (2 if checkpoint.decoding else 1))
    seconds = None if rate is None else passes * layout.nbytes / rate / jobs
    store = checkpoint.source.store
    memory = _BASE + most_kept(store) + jobs * _thread_memory(local, store)
    return Planned(files, layout.nbytes, memory, seconds)


def _thread_memory(local: bool, source: Store | None) -> int:
    """Return what one thread holds at most: a chunk, a span and what is picked out and cast of it.

    For an object store a block more, which S3 is sent as it lies; other clients hold two copies.
    """
    near = source is None or source.traits.local
    read = Gatherer.chunk + 3 * SPAN if near else 4 * REMOTE
    return read + (0 if local else 3 * BLOCK)


def _of_file(file: OutputFile, checkpoint: Checkpoint) -> Iterator[BoxCopy]:
    seen: set[int] = set()
    for segment in file.segments:
        if isinstance(segment, Stored):
            continue
        if not isinstance(segment, Elements) or id(segment.shard) in seen:
            continue
        seen.add(id(segment.shard))
        dtype = segment.shard.dtype
        for fill in segment.shard.fills:
            cast = dtype.name if checkpoint.tensors[fill.key].dtype != dtype else ""
            nbytes = dtype.nbytes(fill.local.volume)
            yield BoxCopy(file.path, fill.key, fill.source, fill.local, nbytes, cast)


def _reading_rate(checkpoint: Checkpoint) -> float | None:
    """Return bytes a second, measured on the head of the largest file."""
    source = checkpoint.source
    sizes = {name: source.entries[name].size for name in checkpoint.members()}
    name = max(sizes, key=lambda n: sizes[n], default="")
    length = min(sizes.get(name, 0), _SAMPLE)
    if not length:
        return None
    began = time.monotonic()
    source.read(name, 0, length)
    return length / max(time.monotonic() - began, 1e-6)
