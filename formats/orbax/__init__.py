"""Checkpoints of Orbax (JAX): a directory of zarr arrays, as files or in an OCDBT database.

    30/_CHECKPOINT_METADATA, commit_success.txt
    30/state/_METADATA, _sharding          the tree, and the mesh of each array
    30/state/manifest.ocdbt, d/…           the merged database
    30/state/ocdbt.process_0/…             what each process wrote
    30/data/metadata                       an item of JSON

One item alone may lie in the step's directory itself. Without OCDBT each array is a directory.

Source: orbax-checkpoint 0.11 and 0.12, `_src/metadata`, `_src/serialization`, `_src/path`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.storage.source import Source

from .names import CHECKPOINT_METADATA, COMMIT, MANIFEST, METADATA

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint

# Items that Orbax's own interfaces name, for steps from before `_CHECKPOINT_METADATA`.
_ITEMS = ("default", "state", "params")
_COMMITTED = rb'"commit_timestamp_nsecs"\s*:\s*(\d|null)'


class Orbax:
    """The format `orbax` (see the module's docstring)."""

    name = "orbax"

    def recognise(self, listing: Listing) -> Recognition | None:
        """Know a step by its metadata, or by the tree in one of its items."""
        if listing.single:
            return None
        names = (CHECKPOINT_METADATA, METADATA, MANIFEST)
        found = next((name for name in names if name in listing.files), "")
        if not found:
            found = next((f"{one}/" for one in _ITEMS if _is_item(listing, one)), "")
        return Recognition(self.name, f"has {found}", _state(listing)) if found else None

    def open(self, source: Source) -> Checkpoint:
        """Parse the metadata and every node of the database; no chunk is read.

        Raises:
            IncompleteError: the save did not finish.
            CorruptError: metadata or a node is missing, damaged, or contradicts the rest.
            UnsafeError: names climb, or metadata are ambiguous or abusive.
            UnsupportedError: a codec, type, item or version that is not read.
        """
        from .reader import open_orbax

        return open_orbax(source)


def _is_item(listing: Listing, name: str) -> bool:
    if name not in listing.directories:
        return False
    inside = listing.inside(name).files
    return METADATA in inside or MANIFEST in inside


def _state(listing: Listing) -> CommitState:
    if COMMIT in listing.files:
        return CommitState.COMMITTED
    if CHECKPOINT_METADATA in listing.files:
        time = re.search(_COMMITTED, listing.head(CHECKPOINT_METADATA, 4096))
        if time is not None:
            # Where items have a marker of their own, the step's comes after them. (The directories
            # of a tree that lies in the step itself are arrays, perhaps thousands.)
            bare = METADATA in listing.files or MANIFEST in listing.files
            items = () if bare else listing.directories
            ended = time[1] != b"null" and not any(
                COMMIT in listing.inside(one).files for one in items
            )
            return CommitState.COMMITTED if ended else CommitState.UNCOMMITTED
    return CommitState.NO_MARKER
