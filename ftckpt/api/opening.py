"""From a path to an open checkpoint, and what all functions of the API share."""

from __future__ import annotations

from ftckpt.amounts import seconds as seconds
from ftckpt.operations.opening import STORES as STORES
from ftckpt.operations.opening import chosen as chosen
from ftckpt.operations.opening import open_checkpoint as open_checkpoint
from ftckpt.operations.opening import opened as opened
from ftckpt.operations.opening import root_at as root_at
from ftckpt.operations.opening import runs_at as runs_at
from ftckpt.workers import limits


def job_count(jobs: int) -> int:
    """Return a number of threads: what was asked for, or one for each processor we may use."""
    return jobs or limits.jobs()
