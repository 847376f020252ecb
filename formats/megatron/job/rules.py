"""Choose Megatron's built-in split rules for a job by its arguments and shapes."""

from __future__ import annotations

from collections.abc import Iterable

from ftckpt.checkpoint.sharding import Rules
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.megatron.rank_files.tensor_names import LocalTensor
from ftckpt.formats.state.rule_tables import built_in

_GATED = ("swiglu", "gated_linear_unit", "quick_geglu", "geglu", "reglu")


def rules_of(args: Arguments, held: Iterable[LocalTensor], asked: Rules | None = None) -> Rules:
    """Return the rules for a job.

    Args:
        args: of the job.
        held: the model's tensors in the files of its ranks.
        asked: the user's, which come before the built-in ones.
    """
    values = {"gated": int(any(args.flag(name) for name in _GATED))}
    found = built_in("megatron", values | block_sizes(args) | _latent(args, held))
    return asked.before(found) if asked else found


def block_sizes(args: Arguments) -> dict[str, int]:
    """Return the rows of the parts of packed projections, by the names that the rules have."""
    return _state_space(args) | _delta(args)


def _state_space(args: Arguments) -> dict[str, int]:
    """Return the sizes of the sub-blocks of state-space layers.

    They are recorded, or follow from what is (`MambaMixer` in megatron/core/ssm/mamba_mixer.py).
    """
    width = args.count("mamba_head_dim", 64) or 64
    heads = args.count("mamba_num_heads") or 2 * args.count("hidden_size") // width
    groups = args.count("mamba_num_groups", 8) * args.count("mamba_state_dim", 128)
    if not heads or not groups:
        return {}
    return {"mamba_inner": heads * width, "mamba_groups": groups, "mamba_heads": heads}


def _delta(args: Arguments) -> dict[str, int]:
    """Return the sizes of the sub-blocks of linear attention; none where they are not recorded.

    Source: `GatedDeltaNet` in megatron/core/ssm.
    """
    keys = args.count("linear_num_key_heads") * args.count("linear_key_head_dim")
    heads = args.count("linear_num_value_heads")
    values = heads * args.count("linear_value_head_dim")
    if not keys or not values:
        return {}
    return {"delta_keys": keys, "delta_values": values, "delta_heads": heads}


def _latent(args: Arguments, held: Iterable[LocalTensor]) -> dict[str, int]:
    """Return whether the projections down to latent attention's ranks are cut.

    With Transformer Engine each rank holds all of them, in Megatron's own layers a part; their rows
    show which (`MLASelfAttention` in megatron/core/transformer/multi_latent_attention.py). One
    tensor rank has all rows either way: there the arguments show which layers the job has, or
    nothing does.
    """
    rows = args.count("kv_lora_rank") + args.count("qk_pos_emb_head_dim")
    alone = args.count("tensor_model_parallel_size") == 1
    make = {"transformer_engine": "latent_whole", "local": "latent_cut"}
    for local in held:
        if local.name.endswith(".linear_kv_down_proj.weight") and rows and local.ref.shape:
            if alone:
                known = make.get(str(args.get("transformer_impl")))
                return {known: 1} if known else {}
            return {"latent_whole" if local.ref.shape[0] == rows else "latent_cut": 1}
    return {}
