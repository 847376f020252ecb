"""The model's weights in another floating type; optimizer state keeps its own.

Masters and moments are what a restart continues from: rounded, they would lose what the smaller
updates had added. Buffers stay too: running statistics and masks are kept in single precision for a
reason.
"""

from __future__ import annotations

from collections.abc import Collection

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.transfer.content import Content, TargetTensor

# As flags spell them.
TARGETS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Types whose values stand for themselves: those of fewer bits have scales beside them.
CASTABLE = frozenset(("float64", "float32", "float16", "bfloat16"))
WEIGHTS = frozenset((Kind.PARAM,))


def target_of(dtype: str) -> DType:
    """Return the type that a key of `TARGETS` means.

    Raises:
        UsageError: no such type.
    """
    if dtype not in TARGETS:
        raise UsageError(f"{dtype} is not a type to cast to: {', '.join(TARGETS)} are")
    return DTYPES[TARGETS[dtype]]


def retype(
    content: Content,
    dtype: str,
    *,
    components: Collection[str] = ("model",),
    kinds: Collection[Kind] = WEIGHTS,
) -> Content:
    """Cast floating tensors; the others stay.

    Args:
        content: whose tensors.
        dtype: a key of `TARGETS`.
        components: of the tensors that are cast.
        kinds: of the tensors that are cast.

    Raises:
        UsageError: no such type.
        UnsupportedError: a weight of eight bits or fewer, whose values are in scales beside it.
    """
    target = target_of(dtype)

    def cast(wanted: TargetTensor) -> TargetTensor:
        if (
            wanted.component not in components
            or wanted.kind not in kinds
            or wanted.dtype.family != "float"
        ):
            return wanted
        if wanted.dtype.name not in CASTABLE:
            raise UnsupportedError(
                f"{wanted.name} is {wanted.dtype.name}: its values depend on scales stored beside "
                "it, so that a cast of it alone means nothing",
                hint="--drop leaves it out; without --dtype it is kept as it is",
                tensor=wanted.key,
            )
        return wanted._replace(dtype=target)

    return content.with_tensors(map(cast, content.tensors.values()))
