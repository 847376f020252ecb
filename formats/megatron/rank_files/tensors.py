"""Put the parts of Megatron's ranks together: each part becomes boxes of the whole model's tensor.

A part is cut over tensor-parallel ranks by a rule for its name (`ftckpt.checkpoint.rules`), experts
over the tensor ranks of their own group; a tensor that holds all experts of its rank is a slab of
one that holds all experts. What comes twice is a replica: norms on every tensor rank, dense weights
in every expert rank's directory, tied embeddings on the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ftckpt.checkpoint import Box, TensorInfo
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.checkpoint.rules import Rules
from ftckpt.checkpoint.sharding import REPLICATED, Split, global_shape, slabs
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.ranks.tensors import (
    PieceBoxes,
    RankEntry,
    Report,
    TensorIdentity,
    agreeing,
    odd,
)
from ftckpt.formats.torch_files.dtensor import Patch
from ftckpt.formats.torch_files.values import TensorRef


class RankPart(NamedTuple):
    """What one rank holds of one tensor."""

    entry: RankEntry  # the rank, the file and the elements
    share: int  # which of the parts over tensor-parallel ranks
    experts: int | None = None  # the part's first expert, where it holds all experts of its rank


class WholeTensor(NamedTuple):
    """One tensor of the whole model, before its parts are put together."""

    identity: TensorIdentity  # what it is
    rule_name: str  # the weight's name, by which the rule is found
    parts: int  # over how many tensor-parallel ranks it is cut, if it is
    experts: int | None = None  # how many experts it holds, where it holds them all
    number: bool = False  # whether it is a single number that every rank has


def put_together(
    whole: WholeTensor, parts: Sequence[RankPart], rules: Rules, report: Report
) -> TensorInfo | None:
    """Return the logical tensor, or None where no part fits its rule.

    A part that contradicts the others is reported and left out, so that the tensor shows a hole and
    can never be read as if it were whole.

    Args:
        whole: what the tensor is.
        parts: what each rank holds of it, main copies first.
        rules: how names are cut.
        report: takes findings.

    Raises:
        UnsupportedError: it is cut over several ranks and no rule knows its name.
    """
    identity = whole.identity
    sound = {id(e) for e in agreeing(identity, [part.entry for part in parts], report)}
    parts = [part for part in parts if id(part.entry) in sound]
    head = parts[0].entry.held
    assert isinstance(head, TensorRef)
    split = REPLICATED
    if not whole.number and whole.parts > 1:
        split = rules.find(whole.rule_name).split
    boxes = PieceBoxes()
    try:
        shape = global_shape(head.shape, split, whole.parts)
        for part in parts:
            share = 0 if split.axis is None else part.share
            assert isinstance(part.entry.held, TensorRef)
            patches = _patches(shape, split, whole.parts, share, part.experts)
            boxes.add(part.entry, part.entry.held, patches)
    except UsageError as error:
        report(odd("shape-mismatch", identity, parts[0].entry, f"cannot be: {error.message}, in"))
        return None
    if whole.experts is not None:
        shape = (whole.experts, *shape[1:])
    return TensorInfo(
        identity.component,
        identity.name,
        identity.kind,
        shape,
        head.dtype,
        tuple(boxes.pieces),
        identity.stored_name,
    )


@lru_cache(maxsize=4096)  # layers repeat a few shapes
def _patches(
    shape: tuple[int, ...], split: Split, parts: int, share: int, experts: int | None
) -> tuple[Patch, ...]:
    """Return the boxes of the whole tensor that a part holds, and where they begin in it."""
    return tuple(
        Patch(_lifted(slab.box, experts), slab.local.offsets)
        for slab in slabs(shape, split, parts, share)
    )


def _lifted(box: Box, experts: int | None) -> Box:
    """Return a box of a rank's experts as a box of all experts."""
    if experts is None:
        return box
    return Box((box.offsets[0] + experts, *box.offsets[1:]), box.sizes)


def by_expert(ref: TensorRef, experts: int, name: str) -> TensorRef:
    """Return a tensor of all experts of a rank with its experts as the first axis.

    `weight1` [in, experts · out] and `weight2` [experts · in, out] are 2-D in name only: the layer
    that uses them views their memory as [experts, in, out] (`GroupedMLP` in
    megatron/core/transformer/moe/experts.py, core 0.5 to 0.12).

    Raises:
        UnsupportedError: it cannot be viewed so.
    """
    sound = len(ref.shape) == 2 and ref.dense and experts > 0
    axis = 1 if name.endswith("1") else 0
    if not sound or ref.shape[axis] % experts:
        raise UnsupportedError(
            f"{name} of shape {list(ref.shape)} does not hold {experts} experts", tensor=name
        )
    each = [n // experts if d == axis else n for d, n in enumerate(ref.shape)]
    shape = (experts, *each)
    return ref._replace(shape=shape, strides=dense_strides(shape))
