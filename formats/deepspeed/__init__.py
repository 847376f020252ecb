"""Checkpoints of DeepSpeed: ZeRO stages 0 to 3, pipelines, tensor parallelism.

The unit is one tag (`global_step1000`). Weights in the compute type are the model's; the flat fp32
partitions are its masters, the moments lie beside them. Stage 3 stores no weights of their own: the
masters are what there is. Nothing marks the end of a save, so a missing file is a defect of the set
and no proof of a crash.

Names are those of the module's `state_dict`, to which DeepSpeed adds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.storage.source import Source

from .names import ZERO, deepspeed_files

if TYPE_CHECKING:
    from ftckpt.checkpoint.sharding import Rules

    from .checkpoint import DeepSpeedCheckpoint


class DeepSpeed:
    """The format `deepspeed` (see the module's docstring)."""

    name = "deepspeed"

    def __init__(self, rules: Rules | None = None) -> None:
        """Read by `rules` how parameters are cut over tensor-parallel ranks.

        They are asked before what the checkpoint records and before the names of
        Megatron-DeepSpeed.
        """
        self.rules = rules

    def recognise(self, listing: Listing) -> Recognition | None:
        """Know it by the names of its files; a universal checkpoint has some of them too."""
        if listing.single or ZERO in listing.directories:
            return None
        files = deepspeed_files(listing.files)
        if not files:
            return None
        return Recognition(self.name, f"has {files[0].path}", CommitState.NO_MARKER)

    def open(self, source: Source) -> DeepSpeedCheckpoint:
        """Parse the pickles of all files and put their tensors together.

        Raises:
            NotFoundError: none of DeepSpeed's files is there.
            IncompleteError: layers alone are there, which a pipeline saves first.
            CorruptError: no file says which parameters there are; other damage is a finding.
            UnsafeError: a file is hostile.
            UnsupportedError: experts in a pipeline, offloaded tensors, or a cut that no rule
                explains.
        """
        from .reader import open_deepspeed

        return open_deepspeed(source, self.rules)
