"""Megatron-Core's `torch_dist`: a DCP store, `metadata.json`, and the state that is not a tensor.

    iter_0000123/
        metadata.json        written after all else: {"sharded_backend": "torch_dist", …}
        .metadata            of torch.distributed.checkpoint
        __R_T.distcp         of rank R
        common.pt            up to core 0.18; since then the object common_state/shard_0_1
        integrity.json       since core 0.18, where asked for

The DCP reader reads the store. Here the stacked layers and experts become logical tensors of their
own, and optimizer state is given to the parameters it belongs to. Names are those on disk, which
are Transformer Engine's whatever implementation trained; gated MLPs lie there as [gate | up], so
no rule of tensor parallelism applies.

Source: megatron/core/dist_checkpointing (core 0.4 to 0.19).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.formats.dcp.names import COMMON, CONFIGURATION, MARKER
from ftckpt.storage.source import Source

if TYPE_CHECKING:
    from .reader import MegatronDistCheckpoint

_BACKEND = rb'"sharded_backend"\s*:\s*"torch_dist"'


# What Megatron and NeMo keep in the common state, and what their stores name.
_STATE = re.compile(
    rb"checkpoint_version|content_metadata|iteration|global_step|lightning|opt_param_scheduler"
)
_STORE = re.compile(rb"decoder\.layers|word_embeddings|/shard_\d+_\d+|optimizer\.state\.")
_HEAD = 4096


def _by_megatron(listing: Listing) -> bool:
    """Say whether more than the name of one file shows Megatron: others save a `common.pt` too."""
    return any(
        name in listing.files and pattern.search(listing.head(name, _HEAD)) is not None
        for name, pattern in ((COMMON, _STATE), (MARKER, _STORE))
    )


class MegatronDist:
    """The format."""

    name = "megatron-dist"

    def recognise(self, listing: Listing) -> Recognition | None:
        """Know it by what `metadata.json` says, or by the common state of a save without it."""
        names = listing.files
        if listing.single:
            return None
        if CONFIGURATION in names:
            # With the common state it is Megatron's, whatever is left of what the file said.
            if not re.search(_BACKEND, listing.head(CONFIGURATION, 4096)) and not (
                COMMON in names and MARKER in names
            ):
                return None
            return Recognition(self.name, f"has {CONFIGURATION} of torch_dist",
                               CommitState.COMMITTED)  # fmt: skip
        # A save that ends at its start leaves the common state alone.
        begun = set(listing.at_hand.files) == {COMMON}
        if COMMON in names and (
            _by_megatron(listing)
            if begun or MARKER in names
            else any(n.endswith(".distcp") for n in names)
        ):
            return Recognition(
                self.name, f"has {COMMON} but no {CONFIGURATION}", CommitState.UNCOMMITTED
            )
        return None

    def open(self, source: Source) -> MegatronDistCheckpoint:
        """Parse the metadata and say what the stored tensors stand for.

        Raises:
            IncompleteError: `metadata.json` or `.metadata` was not written (`uncommitted`).
            UnsupportedError: another backend or version.
            CorruptError, UnsafeError, NoResourceError: as of the metadata.
        """
        from .reader import open_dist

        return open_dist(source)
