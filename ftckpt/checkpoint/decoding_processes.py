"""Choose the number of processes that decode a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.workers.budget import process_count

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint


def for_reading(checkpoint: Checkpoint, jobs: int, each: int = 0) -> int:
    """Return how many processes read a checkpoint faster than `jobs` threads; 0 for none.

    0 if a part of it is not local, because they would share its connections. `each` is the bytes
    that one process holds besides the decoded ones.

    Raises:
        FtckptError: a base cannot be opened.
    """
    if not checkpoint.is_local():
        return 0
    return process_count(min(jobs, checkpoint.decoding.slots()), each, decoding=True)
