"""What a verb takes of the machine, for the whole process."""

from __future__ import annotations

from ftckpt import amounts


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
