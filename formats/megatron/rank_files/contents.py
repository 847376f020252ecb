"""List what one rank of a legacy Megatron checkpoint holds of the model, in its order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ftckpt.checkpoint import Kind, tensor_key
from ftckpt.checkpoint.optimizer_states import KINDS
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.formats.megatron.job.layout import TargetLayout
from ftckpt.formats.megatron.job.module_order import Order, RankFileItem, items
from ftckpt.formats.megatron.job.stages import Stage
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.transfer.content import TargetTensor

from .grid import Coordinate
from .parts import Parts
from .tensor_names import LocalTensor

Firsts = Mapping[Stage, Mapping[str, int]]


class ModelTensor(NamedTuple):
    """A tensor of the model on one rank."""

    local: LocalTensor  # as the rank's file will have it; where its elements are is not said
    weight: str  # its name in the whole model; the embedding's for a copy of it
    item: RankFileItem  # its place in the file
    wanted: TargetTensor  # the whole tensor


class RankModel(NamedTuple):
    """What one rank holds of the model."""

    at: Coordinate  # the rank
    chunks: list[list[RankFileItem]]  # all places of each model chunk, in order
    held: list[ModelTensor]  # the tensors that stand there, in order

    @property
    def parameters(self) -> list[ModelTensor]:
        """Those that optimizers update."""
        return [one for one in self.held if one.local.kind is Kind.PARAM]


def holdings(
    parts: Parts, order: Order, firsts: Firsts, target: TargetLayout, experts: int
) -> list[RankModel]:
    """Return what every rank holds, in the order of the directories.

    Args:
        parts: how tensors are cut.
        order: of every stage.
        firsts: the number in the model of the first layer of each stack on each stage.
        target: the layout.
        experts: how many experts each expert-parallel rank holds.

    Raises:
        UsageError, UnsupportedError: see `Parts.shape`.
    """
    found = []
    for at in target.grid.directories():
        chunks, held = [], []
        for chunk in range(target.chunks):
            stage = Stage(at.pp, chunk)
            chunks.append(list(items(order[stage], firsts[stage], at.ep, experts)))
            held += [one for item in chunks[-1] if (one := _held(parts, item, chunk))]
        found.append(RankModel(at, chunks, held))
    return found


def _held(parts: Parts, item: RankFileItem, chunk: int) -> ModelTensor | None:
    """Return the tensor at one place; None where nothing, or no tensor of the model, stands."""
    wanted = parts.content.tensors.get(item.weight) if item.entry.full else None
    if wanted is None or wanted.component != "model":
        return None
    shape = parts.shape(wanted, item.weight)
    ref = TensorRef("", 0, shape, dense_strides(shape), wanted.dtype)
    return ModelTensor(LocalTensor(chunk, item.name, ref, wanted.kind), item.weight, item, wanted)


def state_key(weight: str, leaf: str) -> str:
    """Return the key of the state that an optimizer keeps of a weight under the name `leaf`."""
    kind = KINDS.get(leaf, Kind.OTHER)
    return tensor_key("optimizer", kind, f"{weight}.{leaf}" if kind is Kind.OTHER else weight)
