"""DeepSpeed's universal checkpoints: one folder a parameter, for a job of any topology.

    zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
    zero/optimizer_state.pt                                      what is not a parameter's
    mp_rank_MM_model_states.pt, zero_pp_rank_*_model_states.pt   copied from the source, unchanged

A state is a dict with the whole logical tensor as `param`, without the padding of a vocabulary;
of a plain stage 3 source it is a flat vector, whose shape the model's files give. Such a source has
its steps in `optimizer_state.pt` alone, beside rank 0's flat partitions, which repeat what the
folders hold and are not read.

A pipeline's files of layers are not copied, so there the masters are all that there is.

The converter works in `tmp/` and copies the model's files last. Nothing marks the end, so `tmp/`
without them is an interrupted conversion.

Source: `deepspeed/checkpoint/ds_to_universal.py` of DeepSpeed 0.19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.formats.deepspeed.names import STATE, TMP, ZERO, deepspeed_files
from ftckpt.storage.source import Source

if TYPE_CHECKING:
    from ftckpt.checkpoint.sharding import Rules

    from .reader import UniversalCheckpoint


class DeepSpeedUniversal:
    """The format `deepspeed-universal` (see the module's docstring)."""

    name = "deepspeed-universal"

    def __init__(self, rules: Rules | None = None) -> None:
        """Read by `rules` how the model's weights are cut over tensor-parallel ranks."""
        self.rules = rules

    def recognise(self, listing: Listing) -> Recognition | None:
        """Know it by `zero/optimizer_state.pt`, or by model's files beside `zero`."""
        if listing.single or ZERO not in listing.directories:
            return None
        inside = listing.inside(ZERO)
        model = bool(deepspeed_files(listing.files))
        working = TMP in listing.directories
        if STATE not in inside.files and not (inside.directories and (model or working)):
            return None
        commit = CommitState.UNCOMMITTED if working and not model else CommitState.NO_MARKER
        reason = f"has {ZERO}/{STATE}" if STATE in inside.files else f"has {ZERO}/"
        return Recognition(self.name, reason, commit)

    def open(self, source: Source) -> UniversalCheckpoint:
        """Parse the pickles of all files.

        Raises:
            IncompleteError: the conversion was interrupted.
            CorruptError: no file says which parameters there are; other damage is a finding.
            UnsafeError: a file is hostile.
            UnsupportedError: no rule says how the model's weights are cut.
        """
        from .reader import open_universal

        return open_universal(source, self.rules)
