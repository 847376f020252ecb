"""Decide how many copies of this process decode a checkpoint at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.workers.budget import process_count

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint


def for_reading(checkpoint: Checkpoint, jobs: int, each: int = 0) -> int:
    """Return how many copies read a checkpoint faster than `jobs` threads; 0 for none.

    None where a part of it is not on this machine: they would share its connections.

    Args:
        checkpoint: what is read.
        jobs: number of threads that fit into the memory.
        each: bytes that one of them holds beside what it decodes.

    Raises:
        FtckptError: what its tensors are decoded from cannot be opened.
    """
    if not checkpoint.is_local():
        return 0
    return process_count(min(jobs, checkpoint.decode_slots()), each, decoding=True)
