"""Options that bound what a verb takes of the machine; several verbs share them."""

from __future__ import annotations

from typing import Annotated

from ftckpt import amounts
from ftckpt.operations.definition import option

MemoryOption = Annotated[str, option("SIZE", "Memory limit.", "--max-memory")]
JobsOption = Annotated[int, option("N", "Workers; 0: one a processor.", "--jobs", "-j", min=0)]
RateOption = Annotated[str, option("RATE", "Read no faster: 200MiB/s.", "--limit-rate")]


def bound_memory(text: str) -> int:
    """Set the memory budget of the process and return it in bytes.

    Raises:
        UsageError: `text` is not a size.
    """
    from ftckpt.workers import budget, limits

    nbytes = amounts.size(text)
    available = limits.memory()
    budget.set_budget(nbytes if available is None else min(nbytes, available))
    return nbytes


def job_count(jobs: int) -> int:
    """Return a number of threads: what was asked for, or one for each processor we may use."""
    from ftckpt.workers import limits

    return jobs or limits.jobs()
