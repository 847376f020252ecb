"""Megatron-FSDP (`fsdp_dtensor`): a plain DCP store of a Megatron job, under the job's own names.

    .metadata            of torch.distributed.checkpoint, and its commit marker
    __R_0.distcp         of rank R: rows of DTensors, unevenly cut

The DCP reader reads the store. Here its names become those of `megatron-dist`:

    model.module.decoder.layers.0.mlp.linear_fc1.weight_w     gates of a gated MLP
    model.module.decoder.layers.0.mlp.linear_fc1.weight_v     its ups
    decoder.layers.0.mlp.linear_fc1.weight                    both: the logical name
    model.module.decoder.layers.0.mlp.experts.linear_fc1.weight3_w
    decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight
    optimizer.state.module.module.module.NAME.exp_avg         a moment of NAME
    optimizer.param_to_group_meta.module.module.module.NAME.lr   a setting of NAME's group

Source: `preprocess_fsdp_dtensor_state_dict` in megatron/training/checkpointing.py,
megatron/core/transformer/fsdp_dtensor_checkpoint.py, `sharded_param_state_fsdp_dtensor` in
megatron/core/optimizer/distrib_optimizer.py (core 0.16 to 0.19), tools/checkpoint/
checkpoint_inspector.py (2026).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.formats.dcp.names import CONFIGURATION, MARKER
from ftckpt.storage.source import Source

if TYPE_CHECKING:
    from .reader import MegatronFsdpCheckpoint

# A parameter of a Megatron model behind the names of its wrappers; a store begins with such names.
_SIGN = re.compile(
    rb"(?:model|optimizer\.state)\.(?:module\.)+(?:language_model\.)?"
    rb"(?:embedding|decoder|encoder|output_layer|mtp)\."
)
_HEAD = 8192


class MegatronFsdp:
    """The format."""

    name = "megatron-fsdp"

    def recognise(self, listing: Listing) -> Recognition | None:
        """Recognise it by the names at the beginning of the metadata: it has no file of its own."""
        names = listing.files
        if listing.single or MARKER not in names or CONFIGURATION in names:
            return None
        if not _SIGN.search(listing.head(MARKER, _HEAD)):
            return None
        reason = f"{MARKER} names a Megatron model behind wrappers"
        return Recognition(self.name, reason, CommitState.COMMITTED)

    def open(self, source: Source) -> MegatronFsdpCheckpoint:
        """Parse the metadata; see `ftckpt.discovery.recognise.Format.open`."""
        from .reader import open_fsdp

        return open_fsdp(source)
