"""Megatron-LM's legacy checkpoints: one directory a tensor, pipeline and expert rank.

    iter_0000100/mp_rank_00_000/model_optim_rng.pt     weights, optimizer, RNG, arguments
                                distrib_optim.pt       the distributed optimizer's state

Every tensor is read as the whole model's: layers and experts have the model's numbers, and each
rank's part is boxes of the whole tensor. Nothing in the directory marks the end of a save; the
root's `latest_checkpointed_iteration.txt` points to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.storage.source import Source

from .names import directory_ranks

if TYPE_CHECKING:
    from ftckpt.checkpoint.sharding import Rules

    from .reader import MegatronCheckpoint


class Megatron:
    """Legacy Megatron (fits `ftckpt.discovery.recognise.Format`)."""

    name = "megatron"

    def __init__(self, rules: Rules | None = None) -> None:
        """Read by `rules` how tensors are cut; they are asked before the built-in table."""
        self.rules = rules

    def recognise(self, listing: Listing) -> Recognition | None:
        """Say whether directories of ranks lie in the listing."""
        if listing.single:
            return None
        first = min((d for d in listing.directories if directory_ranks(d)), default="")
        if not first:
            return None
        return Recognition(self.name, f"has {first}/", CommitState.NO_MARKER)

    def open(self, source: Source) -> MegatronCheckpoint:
        """Parse the pickles of all ranks and put their tensors together.

        Raises:
            IncompleteError: no rank has a file.
            CorruptError: no rank's file can be parsed; damage of some is a finding of `check`.
            UnsafeError: a file is hostile.
            UnsupportedError: a checkpoint_version below 2.0, names of ranks that no arguments
                explain, quantised weights, or tensors that are cut and that no rule knows.
        """
        from .reader import open_megatron

        return open_megatron(source, self.rules)
