"""Refuse arguments of which Megatron-core builds another model than `config.json` describes.

Sources: `group_limited_topk`, `topk_routing_with_score_function` and `YarnRotaryEmbedding` of
Megatron-core; modeling_rope_utils.py and the models' routers in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.huggingface.config import CONFIG

from .one_way_arguments import is_number

_WHOLE = (
    "hidden_size", "num_layers", "ffn_hidden_size", "max_position_embeddings", "seq_length",
    "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_router_num_groups",
    "moe_shared_expert_intermediate_size", "moe_router_group_topk", "q_lora_rank", "kv_lora_rank",
    "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups",
    "mamba_num_heads",
)  # fmt: skip
_POSITIVE = (
    "layernorm_epsilon", "norm_epsilon", "rotary_base", "moe_router_topk_scaling_factor",
    "rope_scaling_factor", "rotary_scaling_factor", "rotary_seq_len_interpolation_factor",
    "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
)  # fmt: skip
# What a class of transformers takes where `config.json` is silent, and Megatron-LM takes otherwise.
_SILENT = {"mixtral": "rotary_base", "gpt_neox": "rotary_percent"}
# How many of a group's best experts make its score in transformers.
_BEST = 2


def require_buildable(said: Mapping[str, Any], config: Mapping[str, Any], family: str) -> None:
    """Refuse what Megatron-core does not build as transformers does.

    Args:
        said: the arguments.
        config: the model's `config.json`, with the fields of rotary embeddings.
        family: of the model.

    Raises:
        UsageError: a model cannot have such a number, or `config` leaves out one.
        UnsupportedError: Megatron-core's model would be another.
    """
    for name in ("layernorm_epsilon", _SILENT.get(family)):
        if name and name not in said:
            raise UsageError(
                f"{CONFIG} does not say Megatron's {name}, whose own default is another model's"
            )
    _require_numbers(said)
    _require_rotation(said, config)
    if said.get("num_experts"):
        _require_router(said)


def _require_numbers(said: Mapping[str, Any]) -> None:
    for name, value in said.items():
        sound = True
        if name in _WHOLE and value is not None:
            sound = type(value) is int and value > 0
        elif name in _POSITIVE:
            sound = is_number(value) and value > 0
        elif name == "rotary_percent":
            sound = is_number(value) and 0 < value <= 1
        if not sound:
            raise UsageError(f"{CONFIG} gives {value!r} for Megatron's {name}, which cannot be")


def _require_rotation(said: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse to rotate a part of each head where Megatron-core rotates all of it."""
    share = said.get("rotary_percent", config.get("partial_rotary_factor"))
    kind = said.get("position_embedding_type")
    whole = "rotary_percent" not in said or kind == "yarn"
    if whole and share not in (None, 1) and kind not in ("none", "learned_absolute"):
        raise UnsupportedError(
            f"{CONFIG} says partial_rotary_factor = {share!r}, and Megatron-core rotates all of"
            " each head" + (" by yarn" if kind == "yarn" else ""),
            file=CONFIG,
        )


def _require_router(said: Mapping[str, Any]) -> None:
    experts, chosen = said["num_experts"], said.get("moe_router_topk")
    if not chosen or chosen > experts:
        raise UsageError(f"{CONFIG} chooses {chosen!r} of {experts} experts for each token")
    plain = said.get("moe_router_score_function") == "softmax" and said["moe_router_pre_softmax"]
    if chosen == 1 and not plain:
        raise UnsupportedError(
            f"{CONFIG} says num_experts_per_tok = 1, and Megatron-core does not normalise the"
            " weight of a single expert",
            file=CONFIG,
        )
    groups, taken = said.get("moe_router_num_groups") or 1, said.get("moe_router_group_topk") or 1
    if taken > groups or experts % groups:
        raise UsageError(f"{CONFIG} chooses {taken} of {groups} groups of {experts} experts")
    if groups > 1 and chosen // taken != _BEST:
        raise UnsupportedError(
            f"{CONFIG} says n_group = {groups}, topk_group = {taken} and num_experts_per_tok ="
            f" {chosen}: Megatron-core takes a group by its best {chosen // taken}, not {_BEST}",
            file=CONFIG,
        )
