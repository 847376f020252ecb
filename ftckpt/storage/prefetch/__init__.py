"""Few reads for many small pieces, where the files lie behind a latency.

Read piece by piece, a checkpoint of small tensors takes a request for each, and an object store
answers one in tens of milliseconds. A caller that is about to read many says so
(`ftckpt.checkpoint.read_ahead`): what lies together is then read at once (`plan`), ahead of use and
several at a time, and kept while memory allows. Every reader of the checkpoint's files is served
from that and need not know it. Local files are read as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.storage.store import Store
from ftckpt.workers.budget import budget

if TYPE_CHECKING:
    from .reads import Ahead

_SHARE = 16  # of the budget, as a divisor: two checkpoints are read at once, by a few threads


class Lookahead:
    """What is being read ahead of one checkpoint's files, if anything is.

    Attributes:
        current: in force; None where files are read as they are asked for.
    """

    def __init__(self) -> None:
        self.current: Ahead | None = None


def most_kept(store: Store) -> int:
    """Return how many bytes reading ahead of one checkpoint in a store may keep."""
    return 0 if store.traits.local or not store.traits.gap else budget() // _SHARE
