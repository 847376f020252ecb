"""`config.json` of a Hugging Face model, from the arguments of Megatron.

Source of the fields: `CONFIG_MAPPING` in Megatron-Bridge, and transformers' configuration classes.
"""

from __future__ import annotations

import json
from typing import Any

from ftckpt.checkpoint import Kind
from ftckpt.errors import UnsupportedError
from ftckpt.formats.huggingface.config import weights_dtype
from ftckpt.transfer.content import Content

from .facts import ModelFacts


def config_of(model: ModelFacts, content: Content) -> bytes:
    """Return the text of `config.json` for a model of Megatron.

    Args:
        model: what the checkpoint says of it.
        content: its tensors, under Hugging Face's names: they give the vocabulary, the type of the
            weights, and whether the embedding serves for the output too.

    Raises:
        UnsupportedError: heads that are rotated in part, or a router, that the family does not
            have.
    """
    family, args = model.family, model.arguments
    said: dict[str, Any] = dict(family.config)
    for field, names in family.arguments.items():
        value = next((v for name in names if (v := args.get(name)) is not None), None)
        if isinstance(value, (int, float, str)):
            said[field] = value
    if "n_head" not in said:
        said["num_attention_heads"] = model.heads.queries
        if family.name != "gpt_neox":
            said |= {"num_key_value_heads": model.heads.groups, "head_dim": model.heads.width}
    weights = [w for w in content.tensors.values() if w.kind is Kind.PARAM]
    embedding = {known.text for e in family.entries if e.vocabulary for known in e.hf}
    rows = [w.shape[0] for w in weights if w.name in embedding]
    if rows:
        said["vocab_size"] = rows[0]
    output = next(e.hf[0].text for e in reversed(family.entries) if e.vocabulary)
    said["tie_word_embeddings"] = output in content.aliases or output not in content.tensors
    if dtype := weights_dtype(content):
        said["torch_dtype"] = dtype
    _scaling(model, said)
    _routing(model, said)
    if family.name == "mistral":
        said["sliding_window"] = None  # its class has a window where nothing is said
    return json.dumps(said, indent=2, sort_keys=True).encode() + b"\n"


def _scaling(model: ModelFacts, said: dict[str, Any]) -> None:
    """Add Llama 3's scaling of rotary frequencies, with the constants that Megatron-core has."""
    args = model.arguments
    if args.flag("use_rope_scaling"):
        said["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": float(args.get("rope_scaling_factor", 8.0)),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if args.get("rotary_seq_len_interpolation_factor", 1) != 1:
        said["rope_scaling"] = {
            "rope_type": "linear",
            "factor": float(args.get("rotary_seq_len_interpolation_factor")),
        }
    if (
        args.get("rotary_percent", 1.0) != 1.0
        and not {"rotary_pct", "partial_rotary_factor"} & said.keys()
    ):
        raise UnsupportedError(
            f"{model.family.name} rotates whole heads, the arguments say "
            f"rotary_percent = {args.get('rotary_percent')!r}"
        )


def _routing(model: ModelFacts, said: dict[str, Any]) -> None:
    """Say how the router weighs experts, and refuse what the family's router does not do."""
    args = model.arguments
    if not args.get("num_experts"):
        return
    if args.get("moe_layer_freq", 1) != 1:
        raise UnsupportedError(
            f"{model.family.name} has experts in every layer, the arguments say moe_layer_freq = "
            f"{args.get('moe_layer_freq')!r}"
        )
    before = args.flag("moe_router_pre_softmax")
    if "decoder_sparse_step" in said:
        said["norm_topk_prob"] = not before
    elif before or args.get("moe_router_score_function", "softmax") != "softmax":
        raise UnsupportedError(
            f"{model.family.name} weighs its experts by a softmax over the chosen ones, the "
            "arguments say otherwise (moe_router_pre_softmax, moe_router_score_function)"
        )
