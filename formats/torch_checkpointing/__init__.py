"""Checkpoints of Meta's `torch_checkpointing`: a file an item and rank, and what says how they fit.

    step-10/metadata.pkl                    of sharded items: global shapes, placements, files
    step-10/model_0.pt, optimizer_0.pt …    what rank 0 held of each item
    tmp_step-10/                            while it is written; renamed when every rank is done

Source: torch_checkpointing 0.1.1, `checkpoint_writer.py`, `checkpoint_layout.py`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.storage.source import Source

from .names import METADATA, item_file

if TYPE_CHECKING:
    from .reader import TorchCheckpointingCheckpoint

_HEAD = 4096
# A pickle of plain dicts that says one of the words which no other metadata.pkl has.
_MAGIC = re.compile(
    rb"\x80[\x02-\x05].*(?:nested_path_to_metadata|rank_to_layout_info|sharding_metadata)",
    re.DOTALL,
)


class TorchCheckpointing:
    """The format `torch-checkpointing` (fits `ftckpt.discovery.recognise.Format`)."""

    name = "torch-checkpointing"

    def recognise(self, listing: Listing) -> Recognition | None:
        """Know a save by its metadata, and by a file of an item of some rank beside it.

        The metadata is written with the files, and the folder gets its name at the end, so that it
        marks the end of a save where the folder has its name.
        """
        if listing.single or METADATA not in listing.files:
            return None
        if not _MAGIC.match(listing.head(METADATA, _HEAD)):
            return None
        found = any(item_file(name) for name in listing.files) or listing.directories
        return Recognition(self.name, f"has {METADATA}", CommitState.COMMITTED) if found else None

    def open(self, source: Source) -> TorchCheckpointingCheckpoint:
        """Parse the metadata and the heads of all files, and put the tensors together.

        Raises:
            CorruptError: the metadata cannot be parsed, or no file can; damage of some is a
                finding of `check`.
            NewerWriterError: the metadata are of another form than is known.
            UnsafeError, UnsupportedError: of the first file that is hostile or cannot be read.
        """
        from .reader import open_torch_checkpointing

        return open_torch_checkpointing(source)
