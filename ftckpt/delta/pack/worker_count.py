"""Decide how many threads or processes pack within the memory limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ftckpt.checkpoint import TensorInfo
from ftckpt.delta.codec.choose_encoding import BLOCK
from ftckpt.delta.codec.words import words_of
from ftckpt.extents import BLOCK as PART
from ftckpt.storage.prefetch import most_kept
from ftckpt.storage.store import Store
from ftckpt.workers.budget import demand, process_count, thread_count

_BASE = 64 << 20  # the interpreter, numpy, and the index of a checkpoint of ordinary size
# Blocks that one thread holds: the tensor's, its base's, four that predict it, the prediction, what
# becomes of them on the way to bytes, and in the proof as many again that are decoded.
_BLOCKS = 20


class Workers(NamedTuple):
    """Who packs.

    Attributes:
        jobs: number of threads.
        processes: number of copies of this process that do more than these
        (`ftckpt.workers.processes`), or 0.
    """

    jobs: int
    processes: int


def affordable(
    jobs: int,
    tensors: Iterable[TensorInfo],
    *,
    local: bool,
    chained: bool,
    sources: Iterable[Store] = (),
) -> Workers:
    """Return how many of `jobs` threads fit into the memory budget beside what is held already.

    Args:
        jobs: how many are wanted.
        tensors: that are packed.
        local: whether the destination is on this machine; elsewhere parts of files are held too.
        chained: whether one of the sources is a delta.
        sources: where what is packed, and what it is packed against, lies.

    Raises:
        NoResourceError: the budget is less than one thread needs.
    """
    largest = max((min(info.nbytes, _block_bytes(info)) for info in tensors), default=0)
    each = max(1, _BLOCKS * largest) + (0 if local else 3 * PART)
    demand(_BASE + each, "packing by one thread", decoding=chained)
    ahead = sum(map(most_kept, sources))
    jobs = thread_count(jobs, each, reserved=ahead, decoding=chained)
    if not local:
        return Workers(jobs, 0)
    return Workers(jobs, process_count(jobs, each, reserved=ahead, decoding=chained))


def _block_bytes(info: TensorInfo) -> int:
    words = words_of(info.dtype)
    return BLOCK * words.each * words.size
