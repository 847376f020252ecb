"""The arguments of Megatron for a model of Hugging Face: what `family_config` does, turned round.

Only what makes the model: what trains it is the new job's own.

Source: `load_args_from_checkpoint` in megatron/training/checkpointing.py, `CONFIG_MAPPING` in
Megatron-Bridge, and transformers' configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftckpt.errors import UnsupportedError
from ftckpt.formats.huggingface.config import CONFIG

from .facts import ModelFacts

# How transformers names the function in the MLP.
_ACTIVATIONS = ("hidden_act", "activation_function")
# Llama 3's scaling of rotary frequencies, whose constants Megatron-core has in its code.
_LLAMA3 = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip

# What makes a model too, and what `--use-checkpoint-args` leaves to the command line.
_UNREAD = {
    "bf16": "--bf16", "fp16": "--fp16", "qk_layernorm": "--qk-layernorm",
    "norm_epsilon": "--norm-epsilon", "use_rope_scaling": "--use-rope-scaling",
    "rope_scaling_factor": "--rope-scaling-factor",
    "rotary_seq_len_interpolation_factor": "--rotary-seq-len-interpolation-factor",
    "moe_shared_expert_gate": "--moe-shared-expert-gate",
}  # fmt: skip
# The window of a model's class where `config.json` says nothing of it.
_WINDOWS = {"mistral": 4096}


def arguments_of_config(model: ModelFacts) -> dict[str, Any]:
    """Return the arguments that a model's `config.json` amounts to, by name.

    Args:
        model: with its `config.json`.

    Raises:
        UnsupportedError: the model does what Megatron-core's of this family does not.
    """
    family, config = model.family, model.config
    if not family.arguments:
        raise UnsupportedError(
            f"no table says which arguments of Megatron-core make a {family.name}: its names can be"
            " written in other formats",
            hint="--to safetensors or --to dcp",
        )
    _require_plain(model)
    said: dict[str, Any] = {
        "add_position_embedding": True, "use_rotary_position_embeddings": False,
        "rotary_interleaved": False, "apply_query_key_layer_scaling": False,
        "squared_relu": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    }  # fmt: skip
    said |= {name: value for name, value in family.constants.items() if name != "num_experts"}
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    known = _flattened(config, rotary)
    defaults = family.shapes.defaults if family.shapes is not None else {}
    known = {**{f: known[one] for f, one in defaults.items() if one in known}, **known}
    for first in (True, False):  # an argument is the field's that names it first
        for field, names in family.arguments.items():
            value = known.get(field)
            if isinstance(value, (int, float, str)):
                for name in names[:1] if first else names[1:]:
                    if first or name not in said:
                        said[name] = value
    heads = model.heads
    said |= {
        "num_attention_heads": heads.queries,
        "group_query_attention": heads.groups != heads.queries,
        "num_query_groups": heads.groups,
        "kv_channels": heads.width,
    }
    if family.config.get("hidden_act") == "gelu":  # the fused one is the approximation by tanh
        said["bias_gelu_fusion"] = False
    said.setdefault("ffn_hidden_size", 4 * said.get("hidden_size", 0))
    return said | _scaling(rotary) | _routing(model, said)


def flags_beside(arguments: Mapping[str, Any]) -> str:
    """Return the flags that build the model together with `--use-checkpoint-args`."""
    found = []
    for name, flag in _UNREAD.items():
        value = arguments.get(name)
        if value is True:
            found.append(flag)
        elif value not in (None, False):
            found.append(f"{flag} {value}")
    if arguments.get("bias_gelu_fusion") is False:
        found.append("--no-bias-gelu-fusion")
    return " ".join(found)


def _flattened(config: Mapping[str, Any], rotary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of `config.json`; since transformers 5 rotary ones stand in a dict."""
    moved = {
        "rope_theta": "rope_theta", "rotary_pct": "partial_rotary_factor",
        "partial_rotary_factor": "partial_rotary_factor",
    }  # fmt: skip
    found = {field: rotary[name] for field, name in moved.items() if name in rotary}
    return {**config, **found}


def _require_plain(model: ModelFacts) -> None:
    """Refuse what the family's own Megatron model does in another way."""
    family, config = model.family, model.config
    for field in _ACTIVATIONS:
        wanted = family.config.get(field)
        if wanted is not None and config.get(field, wanted) != wanted:
            raise _unlike(model, field, config[field])
    window = config.get("sliding_window", _WINDOWS.get(family.name))
    if window is not None and config.get("use_sliding_window", True):
        length = config.get("max_position_embeddings")
        if type(window) is not int or type(length) is not int or window < length:
            raise _unlike(model, "sliding_window", window)
    for field, wanted in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if config.get(field) not in (None, wanted):
            raise _unlike(model, field, config[field])


def _scaling(rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that stretch rotary frequencies."""
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    factor = rotary.get("factor")
    if kind == "default":
        return {"use_rope_scaling": False}
    if kind == "llama3" and all(rotary.get(name) == value for name, value in _LLAMA3.items()):
        return {"use_rope_scaling": True, "rope_scaling_factor": factor}
    if kind == "linear" and isinstance(factor, (int, float)) and factor == int(factor):
        return {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": int(factor)}
    raise UnsupportedError(
        f"{CONFIG} scales rotary frequencies in a way that Megatron-core's arguments cannot say: "
        f"{dict(rotary)!r}",
        file=CONFIG,
    )


def _routing(model: ModelFacts, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the router weighs experts; nothing for a dense model."""
    if not said.get("num_experts"):
        return {"num_experts": None}
    says = "decoder_sparse_step" in model.family.config  # Mixtral has no choice
    return {
        "moe_layer_freq": 1,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "aux_loss",
        # Over all experts, the chosen ones' shares as they are; else over the chosen ones alone.
        "moe_router_pre_softmax": says and not model.config.get("norm_topk_prob", False),
    }


def _unlike(model: ModelFacts, field: str, value: Any) -> UnsupportedError:
    return UnsupportedError(
        f"{CONFIG} says {field} = {value!r}, which Megatron-core's {model.family.name} does not do",
        file=CONFIG,
    )
