"""Options of making replicas."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from ftckpt.workers.limits import RateLimit


@dataclass(frozen=True)
class ReplicationOptions:
    """How a copy or a repair is carried out.

    Attributes:
        jobs: blocks in flight.
        executor: where to run instead of own threads.
        limiter: bounds the rate of reading.
        proof: whether what was written is read back and compared before it is visible.
        restart: forget what earlier runs have left at the destination, and build it anew.
        beside: carry the files too that lie in the directory and do not belong to the checkpoint.
    """

    jobs: int = 1
    executor: Executor | None = None
    limiter: RateLimit | None = None
    proof: bool = True
    restart: bool = False
    beside: bool = False
