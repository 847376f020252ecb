"""Checkpoints of one file a rank: every rank ran `torch.save` on what it held.

The unit is one step. verl's `global_step_N` is a checkpoint: its `actor` is the model, every other
folder of rank files (`critic`) the component `extra:<folder>`; the folder `actor` alone opens too.
Nothing marks the end of a save, so a missing rank is a defect of the set and no proof of a crash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.checkpoint import CommitState
from ftckpt.registry import Listing, Recognition
from ftckpt.source import Source

from .rank_files import FOLDERS, rank_files

if TYPE_CHECKING:
    from .rank_checkpoint import RanksCheckpoint


class Ranks:
    """One file a rank (fits `ftckpt.registry.Format`)."""

    name = "ranks"

    def recognise(self, listing: Listing) -> Recognition | None:
        """Say whether rank files lie in the listing, or in verl's folders below it."""
        if listing.single:
            return None
        files = rank_files(listing.files)
        folder = ""
        for name in FOLDERS:
            if not files and name in listing.directories:
                folder = name + "/"
                files = rank_files(listing.inside(name).files)
        if not files:
            return None
        reason = f"has {folder}{files[0].path}"
        return Recognition(self.name, reason, CommitState.NO_MARKER)

    def open(self, source: Source) -> RanksCheckpoint:
        """Parse the pickles of all ranks and put their tensors together.

        Raises:
            NotFoundError: no rank's file is there.
            CorruptError: no rank's file can be parsed; damage of some is a finding of `check`.
            UnsafeError, UnsupportedError: of the first file that is hostile or cannot be read.
        """
        from .rank_opening import open_ranks

        return open_ranks(source)
