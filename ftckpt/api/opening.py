"""From a path to an open checkpoint, and what all functions of the API share."""

from __future__ import annotations

from typing import TypedDict

from ftckpt import amounts
from ftckpt.amounts import seconds as seconds
from ftckpt.operations.opening import STORES as STORES
from ftckpt.operations.opening import chosen as chosen
from ftckpt.operations.opening import open_checkpoint as open_checkpoint
from ftckpt.operations.opening import opened as opened
from ftckpt.operations.opening import root_at as root_at
from ftckpt.operations.opening import runs_at as runs_at
from ftckpt.workers import limits


class RunFlags(TypedDict, total=False):
    """How something is written and proven.

    Attributes:
        no_proof: check neither the source nor, read back, the result.
        restart: forget what another run to the destination has left.
        jobs: threads, or blocks in flight; 0 for one a processor, and for 8 in a copy to or from an
            object store.
        limit_rate: bytes a second, or a text such as "200MiB/s".
    """

    no_proof: bool
    restart: bool
    jobs: int
    limit_rate: float | str


def job_count(jobs: int) -> int:
    """Return a number of threads: what was asked for, or one for each processor we may use."""
    return jobs or limits.jobs()


def rate_limit(rate: float | str) -> limits.RateLimit | None:
    """Return a limiter of bytes a second; None for "" and 0: without a limit.

    Raises:
        UsageError: the text is not a rate.
    """
    number = amounts.rate(rate)
    return limits.RateLimit(number) if number else None
