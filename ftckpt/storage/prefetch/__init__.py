"""Few reads for many small pieces, if the files lie behind a latency.

Read piece by piece, a checkpoint of small tensors takes a request for each, and an object store
answers one in tens of milliseconds. A caller that will read many announces them
(`ftckpt.checkpoint.read_ahead`): neighbours are then read at once (`plan`), ahead of use and
several at a time, and kept while memory allows. Every reader of the checkpoint's files uses that
without knowing. Local files are read directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.storage.store import Store
from ftckpt.workers.budget import budget

if TYPE_CHECKING:
    from .reads import Ahead

_SHARE = 16  # divisor of the budget: two checkpoints are read at once, by a few threads


class Lookahead:
    """The present read-ahead of one checkpoint's files; `current` is None without one."""

    def __init__(self) -> None:
        self.current: Ahead | None = None


def most_kept(store: Store) -> int:
    """Return how many bytes the read-ahead of one checkpoint may keep."""
    return 0 if store.traits.local or not store.traits.gap else budget() // _SHARE
