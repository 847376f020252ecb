"""The model's weights in another floating type; optimizer state keeps its own.

Masters and moments are what a restart continues from: rounded, they would lose what the smaller
updates had added. Buffers stay too: running statistics and masks are kept in single precision for a
reason.

The model's weights made from their masters: rounded once, from what a restart continues from.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ftckpt.checkpoint import Box, Kind, tensor_key
from ftckpt.checkpoint.dtypes import DTYPES, DType
from ftckpt.errors import NotFoundError, UnsupportedError, UsageError
from ftckpt.findings import counted, listed
from ftckpt.transfer.content import Content, Copy, TargetTensor

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


class FromMasters(NamedTuple):
    """Content whose weights come from masters.

    Attributes:
        content: what is written.
        masters: number of weights that do; the others are in single precision themselves.
    """

    content: Content
    masters: int


def from_masters(content: Content) -> FromMasters:
    """Return the content with each weight of the model filled from its master, in its type.

    A weight without a master stays if it is in single or double precision itself.

    Raises:
        NotFoundError: a weight of fewer bits has no master, or one of another shape.
    """
    stored = content.checkpoint.tensors
    # Tied weights have one master, under either name.
    tied = {owner: key for key, owner in content.checkpoint.aliases.items()}
    tied |= content.checkpoint.aliases
    made: list[TargetTensor] = []
    without: list[str] = []
    masters = 0
    for key, wanted in content.tensors.items():
        weight = wanted.component == "model" and wanted.kind is Kind.PARAM
        if not weight or wanted.dtype.family != "float":
            made.append(wanted)
            continue
        twin = stored.get(tied.get(key, ""))
        names = [wanted.name] if twin is None else [wanted.name, twin.name]
        keys = [tensor_key("optimizer", Kind.MASTER, name) for name in names]
        master = next((stored[one] for one in keys if one in stored), None)
        if master is not None and master.shape == wanted.shape:
            box = Box.whole(master.shape)
            made.append(wanted._replace(dtype=master.dtype, copies=(Copy(box, master.key, box),)))
            masters += 1
        else:
            if wanted.dtype.bits < 32:
                without.append(wanted.name)
            made.append(wanted)
    if without:
        raise NotFoundError(
            f"{content.checkpoint.source.url} holds no master for"
            f" {counted(len(without), 'weight')}: {listed(without)}",
            hint="without --from-master the stored weights are written",
        )
    return FromMasters(content.with_tensors(made), masters)
