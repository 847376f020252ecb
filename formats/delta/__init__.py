"""delta: a checkpoint stored as what it adds to another, read as one ordinary checkpoint.

A delta is a directory with `ftckpt.delta`, the index, which is written last, and data files
(`ftckpt.delta.index` has the format). Opening reads the index alone. Its base may be of any format,
on any store, and a delta itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import Format, Listing, Recognition
from ftckpt.own_files import DELTA
from ftckpt.storage import StoreOptions
from ftckpt.storage.source import Source

from .names import DATA, FORMAT

if TYPE_CHECKING:
    from ftckpt.checkpoint.sharding import Rules
    from ftckpt.discovery.roots import Child, Root

    from .checkpoint import DeltaCheckpoint


class Delta:
    """The format `delta` (see the module's docstring)."""

    name = FORMAT

    def __init__(
        self,
        formats: Callable[[Rules | None, Sequence[str]], Sequence[Format]],
        rules: Rules | None = None,
        bases: Sequence[str] = (),
        stores: StoreOptions | None = None,
    ) -> None:
        """Remember how a base is read.

        Args:
            formats: what a base may be, for such a table and such places: the catalog's own
                function.
            rules: the user's table of how tensors are cut, for reading the base.
            bases: places where bases of a chain may lie, asked before those that are recorded.
            stores: how to reach bases; as the delta was reached, where None.
        """
        self.formats, self.rules, self.bases, self.stores = formats, rules, bases, stores

    def recognise(self, listing: Listing) -> Recognition | None:
        """Go by the name of the index, which is written last, else by those of the data files."""
        if listing.single:
            return None
        if DELTA in listing.files:
            return Recognition(self.name, f"has {DELTA}", CommitState.COMMITTED)
        # It has little but these, so that a hundred of its names show one.
        if any(n.endswith(".blocks") and re.fullmatch(DATA, n) for n in listing.at_hand.files):
            return Recognition(self.name, "has blocks of a delta", CommitState.UNCOMMITTED)
        return None

    def open(self, source: Source) -> DeltaCheckpoint:
        """Read the index.

        Raises:
            IncompleteError: it is not there, nor a manifest that says that it was.
            CorruptError: it is damaged, or contradicts itself (`bad-delta`).
            UnsafeError: it names a file outside the delta.
            UnsupportedError: it is of another version, or uses what this one does not know.
        """
        from .reader import open_delta

        stores = source.store.options if self.stores is None else self.stores
        return open_delta(source, self.formats(self.rules, self.bases), self.bases, stores)

    def bases_of_child(self, root: Root, child: Child) -> Sequence[str]:
        """Return the places of all that a checkpoint of a root may depend on.

        Raises:
            CorruptError: the index is damaged (`bad-delta`).
            UnsupportedError: it is of another version: what it is built on cannot be known.
            UnavailableError, DeniedError: it could not be read.
        """
        from .bases import bases

        return bases(root, child)
