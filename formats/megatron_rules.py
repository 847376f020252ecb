"""Which of Megatron's built-in split rules hold for a job: by its arguments."""

from __future__ import annotations

from ftckpt.rules import Rules

from .megatron_ranks import Arguments
from .rule_tables import built_in

_GATED = ("swiglu", "gated_linear_unit", "quick_geglu", "geglu", "reglu")


def rules_of(args: Arguments) -> Rules:
    """Return the rules for a job with these arguments.

    Sub-blocks of state-space layers follow from their sizes, which are recorded whole or as what
    they are derived from (`MambaMixer` in megatron/core/ssm/mamba_mixer.py).
    """
    width = args.count("mamba_head_dim", 64) or 64
    heads = args.count("mamba_num_heads") or 2 * args.count("hidden_size") // width
    groups = args.count("mamba_num_groups", 8) * args.count("mamba_state_dim", 128)
    values = {"gated": int(any(args.flag(name) for name in _GATED))}
    if heads and groups:
        values |= {"mamba_inner": heads * width, "mamba_groups": groups, "mamba_heads": heads}
    return built_in("megatron", values)
