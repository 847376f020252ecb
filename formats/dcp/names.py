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
# Megatron's commit marker: Megatron reads no checkpoint without it.
CONFIGURATION = "metadata.json"
