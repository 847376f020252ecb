"""The names of a DCP checkpoint's files, and of Megatron-Core's files beside them."""

from __future__ import annotations

import re

# The commit marker: one file, or one per rank in a save without collectives.
MARKER = ".metadata"
RANK_METADATA = re.compile(r"__(\d+)\.metadata$")
DATA = re.compile(r"(?:^|/|_)_(\d+)_(\d+)\.distcp$")
# Of Megatron, up to core 0.18: a torch.save stream beside the metadata.
COMMON = "common.pt"
# Of Megatron-Bridge (src/megatron/bridge/training/checkpointing.py, 2025 to 2026): the run's
# progress, as a torch.save stream, and its configuration.
TRAIN_STATE = "train_state.pt"
RUN_CONFIG = "run_config.yaml"
# Of Lightning and Fabric: everything but model and optimizer (the loops, the epoch, the user's
# own), as a torch.save stream, written last. They take no folder without it for a checkpoint
# (lightning/fabric/strategies/fsdp.py, `save_checkpoint`, `_is_sharded_checkpoint`).
META = "meta.pt"
# Megatron's commit marker: Megatron reads no checkpoint without it.
CONFIGURATION = "metadata.json"
# Megatron's SHA-256 digests of the files, where they were asked for (`--verify-integrity`).
INTEGRITY = "integrity.json"
# What each rank saves for itself beside the store, with torch.save: VeOmni's
# `extra_state/extra_state_rank_0.pt` (veomni/checkpoint/dcp_checkpointer.py), prime-rl's
# `dataloader/rank_0.pt` (prime_rl/trainer/ckpt.py), pith-train's `rng-rank-00000.pt`
# (pithtrain/tasks/pretrain_lm.py), all of 2026. The word keeps shards of the model out.
_WORD = r"(?:extra(?:_states?)?|(?:rng|random|train|trainer|client|loader|dataloader)(?:_states?)?)"
OF_RANK = re.compile(
    rf"(?P<before>(?:{_WORD}/)?(?:{_WORD}[-_]|(?<=/)))(?P<tag>rank[-_])(?P<rank>\d{{1,7}})\.pt"
)
