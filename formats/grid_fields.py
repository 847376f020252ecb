"""Recognise fields of non-tensor state that follow the grid of ranks, by their names.

A checkpoint that was resharded says another number of ranks, and the ranks that are no more have no
random streams; nothing of that is a change of the training.
"""

from __future__ import annotations

import re

from ftckpt.comparison import Follows, StateDifference
from ftckpt.formats.ranks.recorded_job import is_number_in, number_of, speaks_of_job

# At the top of a state, or in the arguments or the configuration that it holds.
_TOP = r"(?:^|^(?:args|config|ds_config|content_metadata)\.)"
# The numbers of ranks in each direction, and the own number of one.
_GRID = re.compile(
    _TOP + r"(?:"
    r"(?:global_|local_|node_)?rank|(?:dp_|mp_|tp_|pp_|ep_|cp_)?world_size|num_nodes|nnodes|"
    r"num_shards|"
    # Megatron's arguments
    r"(?:transformer_|virtual_)?pipeline_model_parallel_size|"
    r"(?:expert_)?tensor_(?:model_)?parallel_(?:size|num_weight_shards)|"
    r"(?:data|context|expert_model)_parallel_size|hierarchical_context_parallel_sizes|"
    r"num_layers_per_virtual_pipeline_stage|num_virtual_stages_per_pipeline_rank|"
    r"pipeline_model_parallel_layout|decoder_(?:first|last)_pipeline_num_layers|"
    r"num_distributed_optimizer_instances|inprocess_active_world_size|"
    r"(?:expert_)?gtp_weight_remat_size|"
    # DeepSpeed's
    r"mp_size|(?:tensor|pipe|pipeline|sequence)_parallel_size"
    r")$"
)
# How the state of the optimizer is cut: DeepSpeed's partitions, Megatron's buckets.
_CUT = re.compile(
    r"(?:^|\.)(?:partition_count|group_paddings|zero_stage)(?:\.\d+)?$"
    r"|(?:^|\.)per_bucket_numel(?:_unpadded)?/shard_"
    r"|^optimizer\.(?:\d+\.)?param_state_sharding_type$"
    r"|^content_metadata(?:_note)?\.distrib_optim_sharding_type$"
)
# What another grid makes another: the rows of padding, sequence parallelism without a tensor rank
# beside it, and whether there are streams for its ranks.
_WITH_THE_GRID = re.compile(r"^args\.(?:padded_vocab_size|sequence_parallel|no_save_rng)$")
# Parameters by their numbers, which a pipeline stage gives anew. Where they have names, a
# parameter that moved to another group is a change of the training.
_NUMBERED = re.compile(r"^optimizer\.(?:\d+\.)?(?:optimizer\.)?param_groups\.\d+\.params$")
# Also where all ranks have the same, so that it is one field: Megatron lists its streams by rank.
_OF_A_RANK = re.compile(r"(?:^|[.:/])rank_?\d|/shard_\d|^rng_state\.\d")


def follows(field: StateDifference) -> Follows | None:
    """Return how a field that differs hangs on the grid of ranks; None where it does not."""
    name = field.name
    if _GRID.search(name) or _is_of_the_grid(name):
        return Follows.GRID
    if _CUT.search(name):
        return Follows.STORAGE
    if _WITH_THE_GRID.search(name):
        return Follows.ACROSS
    if _NUMBERED.search(name) and all(_numbers(text) for text in (field.a, field.b) if text):
        return Follows.ACROSS
    ranked = field.rank is not None or _OF_A_RANK.search(name) is not None
    return Follows.ACROSS if ranked and field.about.startswith("rng") else None


def _is_of_the_grid(name: str) -> bool:
    """Say whether a trainer that saves by hand calls a number of ranks, or of one, by this name."""
    *parents, key = name.split(".")
    return (
        number_of(key) != ""
        and key not in _OTHER_STAGES
        and all(speaks_of_job(parent) for parent in parents)
        and (not parents or is_number_in(key, parents[-1]))
    )


# A stage of a curriculum is a stage too.
_OTHER_STAGES = frozenset(("stage", "stages"))


def _numbers(text: str) -> bool:
    """Say whether a list is of numbers, by its first words."""
    return re.match(r"\[\d*[],]", text) is not None
