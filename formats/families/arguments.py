"""The arguments of Megatron for a model of Hugging Face: what `family_config` does, turned round.

Only what makes the model: what trains it is the new job's own.

Source: `load_args_from_checkpoint` in megatron/training/checkpointing.py, `CONFIG_MAPPING` in
Megatron-Bridge, and transformers' configuration classes.

Refuse arguments of which Megatron-core builds another model than `config.json` describes.

Sources: `group_limited_topk`, `topk_routing_with_score_function` and `YarnRotaryEmbedding` of
Megatron-core; modeling_rope_utils.py and the models' routers in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.huggingface.config import CONFIG

from .facts import ModelFacts
from .one_way_arguments import is_number, require_expressible
from .shapes import ShapeTable

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


# How transformers names the function in the MLP.
_ACTIVATIONS = ("hidden_act", "activation_function")
# Llama 3's scaling of rotary frequencies, whose constants Megatron-core has in its code.
_LLAMA3 = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip

# What makes a model too, and what `--use-checkpoint-args` leaves to the command line (core 0.20).
_UNREAD = (
    "bf16", "fp16", "qk_layernorm", "norm_epsilon", "use_rope_scaling", "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor", "moe_shared_expert_gate",
    "layernorm_zero_centered_gamma", "attention_output_gate", "experimental_attention_variant",
    "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "quick_geglu",
    "glu_linear_offset", "activation_func_clamp_value", "softmax_type", "window_size",
    "window_attn_skip_freq", "rotary_scaling_factor", "mscale", "mscale_all_dim",
    "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow",
    "yarn_correction_range_round_to_int", "multi_latent_attention", "q_lora_rank", "kv_lora_rank",
    "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_dtype",
)  # fmt: skip
_FLAGS = {"layernorm_zero_centered_gamma": "--apply-layernorm-1p"}
# Of which only False is said.
_NEGATIVE = ("yarn_correction_range_round_to_int", "bias_dropout_fusion", "bias_gelu_fusion")
# What a Megatron model of yarn-scaled frequencies is told, where `config.json` leaves it out.
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
_YARN_ALL = {"rope_type", "type", "factor", "original_max_position_embeddings", *_YARN}
# Constants of latent attention that only Megatron-core's code has.
_LATENT_YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
_LATENT_ALL = {"rope_type", "type", "factor", "mscale", "mscale_all_dim", *_LATENT_YARN}
_LENGTH = "original_max_position_embeddings"
# What else of rotary embeddings stands beside a scaling, and is an argument of its own.
_ROTARY = {"rope_theta", "partial_rotary_factor"}
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
    if not (family.arguments or family.written) or family.unbuilt:
        why = family.unbuilt or "its table has none"
        raise UnsupportedError(
            f"no arguments of Megatron-LM make a {family.name} ({why}): its names can be written in"
            " other formats",
            hint="--to safetensors or --to dcp",
        )
    _require_plain(model)
    said: dict[str, Any] = {
        "add_position_embedding": True, "use_rotary_position_embeddings": False,
        "rotary_interleaved": False, "apply_query_key_layer_scaling": False,
        "squared_relu": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    }  # fmt: skip
    said |= {name: value for name, value in family.constants.items() if name != "num_experts"}
    rotary = _rotary(config)
    known = _flattened(config, rotary)
    require_expressible(family.required, known, family.name)
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
    if family.written:
        said.setdefault("position_embedding_type", "rope")
    said |= _scaling(model, rotary) | _routing(model, said)
    said |= _written(model, known)
    require_buildable(said, known, family.name)
    return said


def _written(model: ModelFacts, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the table gives for this `config.json`."""
    shapes = model.family.shapes or ShapeTable({}, {}, {})
    every = model.family.written.items()
    found = {name: argument.value(name, shapes, known) for name, argument in every}
    return {name: value for name, value in found.items() if value not in (None, "")}


def flags_beside(arguments: Mapping[str, Any]) -> str:
    """Return the flags that build the model together with `--use-checkpoint-args`."""
    found = []
    for name in _UNREAD:
        value = arguments.get(name)
        flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
        if value in (None, False) or name in _NEGATIVE:
            continue
        if isinstance(value, (list, tuple)):
            text = ",".join(map(str, value))
            value = f"[{text}]" if isinstance(value, list) else text
        found.append(flag if value is True else f"{flag} {value}")
    for name in _NEGATIVE:
        if arguments.get(name) is False:
            found.append(f"--no-{name.replace('_', '-')}")
    return " ".join(found)


def _rotary(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what `config.json` says of rotary embeddings apart from its own fields.

    Raises:
        UsageError: it says no map of fields, or two that differ.
    """
    found: dict[str, Any] = {}
    for field in ("rope_parameters", "rope_scaling"):
        said = config.get(field)
        if said is not None and not isinstance(said, dict):
            raise UsageError(f"{CONFIG} says {field} = {said!r}, not a map of fields")
        if found and said and said != found:  # transformers takes the second, other readers do not
            raise UsageError(f"{CONFIG} says rope_parameters = {found!r} and {field} = {said!r}")
        found = found or dict(said or {})
    length = config.get(_LENGTH)
    if length is not None and found:
        if found.get(_LENGTH, length) != length:
            raise UsageError(f"{CONFIG} says {_LENGTH} = {length!r} and, in {found!r}, another")
        if found.get("rope_type", found.get("type")) in ("llama3", "yarn"):
            found[_LENGTH] = length
    return found


def _flattened(config: Mapping[str, Any], rotary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of `config.json`; since transformers 5 rotary ones stand in a dict."""
    moved = {
        "rope_theta": "rope_theta", "rotary_pct": "partial_rotary_factor",
        "partial_rotary_factor": "partial_rotary_factor", "rope_type": "rope_type",
    }  # fmt: skip
    found = {field: rotary[name] for field, name in moved.items() if name in rotary}
    if "rope_type" not in found and "type" in rotary:
        found["rope_type"] = rotary["type"]
    return {**config, **found}


def _require_plain(model: ModelFacts) -> None:
    """Refuse what the family's own Megatron model does in another way."""
    family, config = model.family, model.config
    for field in _ACTIVATIONS:
        wanted = family.config.get(field)
        if wanted is not None and config.get(field, wanted) != wanted:
            raise _unlike(model, field, config[field])
    window = config.get("sliding_window", _WINDOWS.get(family.name))
    if "window_size" in family.written:
        window = None  # the family has one, and arguments say it
    if window is not None and config.get("use_sliding_window", True):
        length = config.get("max_position_embeddings")
        if type(window) is not int or type(length) is not int or window < length:
            raise _unlike(model, "sliding_window", window)
    for field, wanted in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if config.get(field) not in (None, wanted):
            raise _unlike(model, field, config[field])


def _scaling(model: ModelFacts, rotary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that stretch rotary frequencies."""
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    factor = rotary.get("factor")
    found: dict[str, Any] | None = None
    latent = model.family.constants.get("multi_latent_attention", False)
    if any(isinstance(value, dict) for value in rotary.values()):
        kind = ""  # each kind of layer has its own
    if latent:
        found = _latent_scaling(kind, rotary)
    elif kind == "yarn" and model.family.written and rotary.keys() <= _YARN_ALL | _ROTARY:
        found = _yarn_scaling(model.config, rotary)
    elif kind == "default":
        found = {"use_rope_scaling": False}
    if found is not None:
        return found
    if latent:
        kind = ""
    if kind == "llama3" and all(rotary.get(name) == value for name, value in _LLAMA3.items()):
        return {"use_rope_scaling": True, "rope_scaling_factor": factor}
    if kind == "linear" and isinstance(factor, (int, float)) and factor == int(factor):
        return {"use_rope_scaling": False, "rotary_seq_len_interpolation_factor": int(factor)}
    raise UnsupportedError(
        f"{CONFIG} scales rotary frequencies in a way that Megatron-core's arguments cannot say: "
        f"{dict(rotary)!r}",
        file=CONFIG,
    )


def _yarn_scaling(config: Mapping[str, Any], rotary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of yarn; None where a number is missing.

    Source: `_compute_yarn_parameters` of transformers, `_apply_yarn_config_from_args` of Megatron.
    """
    said = {**_YARN, **{name: value for name, value in rotary.items() if value is not None}}
    length = said.get(_LENGTH, config.get("max_position_embeddings"))
    numbers = [said.get(name) for name in ("factor", "beta_fast", "beta_slow")]
    if not all(map(is_number, numbers)) or type(length) is not int:
        return None
    if not isinstance(rotary.get("truncate", True), bool):  # transformers takes null for false
        return None
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": float(said["factor"]),
        "yarn_original_max_position_embeddings": length,
        "yarn_beta_fast": float(said["beta_fast"]),
        "yarn_beta_slow": float(said["beta_slow"]),
        "yarn_correction_range_round_to_int": said["truncate"],
        # With these the concentration is that of the factor alone.
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }


def _latent_scaling(kind: Any, rotary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of latent attention, which Megatron always scales; None for no such."""
    if kind == "default":
        return {"rope_type": "yarn", "rotary_scaling_factor": 1.0, "mscale_all_dim": 1.0}
    factor, scales = rotary.get("factor"), [rotary.get(n) for n in ("mscale", "mscale_all_dim")]
    same = all(rotary.get(name, value) == value for name, value in _LATENT_YARN.items())
    same = same and _LENGTH in rotary  # else it is max_position_embeddings
    both = scales == [None, None] or all(is_number(n) and n > 0 for n in scales)
    if kind != "yarn" or not same or not both or not rotary.keys() <= _LATENT_ALL | _ROTARY:
        return None
    if not is_number(factor):
        return None
    one, every = scales if scales[0] is not None else (1.0, 0.0)
    return {
        "rope_type": "yarn", "rotary_scaling_factor": float(factor),
        "mscale": float(one or 0.0), "mscale_all_dim": float(every or 0.0),
    }  # fmt: skip


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
