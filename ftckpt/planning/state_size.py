"""Compute the bytes of training state per parameter, by precision and optimizer.

A trainer saves for a restart: the weights, the fp32 master of narrower weights, and the optimizer's
moments. Gradients are not saved.
"""

from __future__ import annotations

from ftckpt.errors import UsageError

# Bytes of the weights and of their master copy.
PRECISIONS: dict[str, tuple[tuple[str, int], ...]] = {
    "fp32": (("fp32 weights", 4),),
    "bf16": (("bf16 weights", 2), ("fp32 master", 4)),
    "fp16": (("fp16 weights", 2), ("fp32 master", 4)),
    "fp8": (("fp8 weights", 1), ("fp32 master", 4)),
    "purebf16": (("bf16 weights", 2),),
}

# Bytes of the moments; block scales of 8-bit moments (below 2 %) are not counted.
OPTIMIZERS: dict[str, tuple[tuple[str, int], ...]] = {
    "none": (),
    "adamw": (("fp32 exp_avg", 4), ("fp32 exp_avg_sq", 4)),
    "adamw16": (("bf16 exp_avg", 2), ("bf16 exp_avg_sq", 2)),
    "adamw8": (("8-bit exp_avg", 1), ("8-bit exp_avg_sq", 1)),
    "muon": (("fp32 momentum", 4),),
    "sgd": (("fp32 momentum", 4),),
    "lion": (("fp32 exp_avg", 4),),
}


def state_parts(recipe: str) -> tuple[tuple[str, int], ...]:
    """Return (part, bytes per parameter) of `PRECISION-OPTIMIZER`, such as `bf16-adamw`.

    `bf16-adamw` is 14 bytes: 2 + 4 + 4 + 4.

    Raises:
        UsageError: precision or optimizer is not in the tables.
    """
    precision, _, optimizer = recipe.partition("-")
    if precision not in PRECISIONS or (optimizer or "none") not in OPTIMIZERS:
        raise UsageError(
            f"{recipe!r} is not a PRECISION-OPTIMIZER",
            hint=f"precisions: {', '.join(PRECISIONS)}; optimizers: {', '.join(OPTIMIZERS)}",
        )
    return PRECISIONS[precision] + OPTIMIZERS[optimizer or "none"]


def bytes_per_parameter(recipe: str) -> int:
    """Return the bytes of training state per parameter (see `state_parts`)."""
    return sum(size for _, size in state_parts(recipe))
