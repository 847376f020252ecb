"""PyTorch Distributed Checkpoint: `.metadata` and `__<rank>_<n>.distcp` files.

Reads what torch 2.0 to 2.13 write, saves without collectives (`__R.metadata`), compressed items,
and NVRx's dialect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.storage.source import Source

from .names import DATA, MARKER, RANK_METADATA

if TYPE_CHECKING:
    from .reader import DcpCheckpoint


class Dcp:
    """The format."""

    name = "dcp"

    def recognise(self, listing: Listing) -> Recognition | None:
        """Recognise it by its commit marker or by its data files."""
        names = listing.files
        if listing.single:
            return None
        if MARKER in names:
            return Recognition(self.name, f"has {MARKER}", CommitState.COMMITTED)
        if any(RANK_METADATA.search(n) for n in names):
            return Recognition(self.name, "has a metadata file a rank", CommitState.COMMITTED)
        if f"{MARKER}.tmp" in names or any(DATA.search(n) for n in names):
            return Recognition(
                self.name, f"has data files but no {MARKER}", CommitState.UNCOMMITTED
            )
        return None

    def open(self, source: Source) -> DcpCheckpoint:
        """Parse the metadata; see `ftckpt.discovery.recognise.Format.open`."""
        from .reader import open_plain

        return open_plain(source)
