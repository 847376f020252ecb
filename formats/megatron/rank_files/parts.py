"""Compute the part of each whole tensor that one legacy Megatron rank holds.

List what one rank of a legacy Megatron checkpoint holds of the model, in its order.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Box, Kind, tensor_key
from ftckpt.checkpoint.optimizer_states import KINDS
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.checkpoint.sharding import REPLICATED, Rules, Split, part_shape, slabs
from ftckpt.errors import UsageError
from ftckpt.formats.megatron.job.layout import TargetLayout
from ftckpt.formats.megatron.job.module_order import Order, RankFileItem, items
from ftckpt.formats.megatron.job.stages import Stage
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.formats.torch_files.write_tree import Storage, Tensor
from ftckpt.transfer.content import Content, Shard, ShardBox, TargetTensor
from ftckpt.transfer.layout import Elements

from .grid import Coordinate, MegatronGrid
from .tensor_names import LocalTensor, is_expert, is_stacked


class _Cut(NamedTuple):
    """How one tensor, and all state of its shape, is cut."""

    # the shape that is divided over tensor ranks: of an expert rank's own experts
    whole: tuple[int, ...]
    split: Split  # how
    parts: int  # over how many
    part: tuple[int, ...]  # the shape of a part
    shape: tuple[int, ...]  # the one in which a rank's file has it
    strides: tuple[int, ...]  # of that, dense
    stacked: bool  # whether it holds experts, as its first axis


class Parts:
    """How tensors are cut over the ranks of one layout."""

    def __init__(self, content: Content, grid: MegatronGrid, rules: Rules) -> None:
        self.content = content
        self._grid = grid
        self._rules = rules
        self._expert_shares = grid.expert_parts()
        # Every rank asks for every tensor, and the state of a weight is cut as the weight is.
        self._cuts: dict[tuple[str, bool, tuple[int, ...]], _Cut] = {}

    def shape(self, wanted: TargetTensor, weight: str) -> tuple[int, ...]:
        """Return the shape in which every rank's file has its part.

        Args:
            wanted: the whole tensor: a weight, or state of one.
            weight: name of the weight.

        Raises:
            UsageError: it cannot be divided; the message has its name.
            UnsupportedError: no rule says how it is divided.
        """
        return self._cut(wanted, weight).shape

    def shard(self, wanted: TargetTensor, weight: str, at: Coordinate) -> Shard:
        """Return a rank's part; of experts that lie in one tensor with the experts as first axis.

        Raises:
            UsageError, UnsupportedError: see `shape`.
        """
        cut = self._cut(wanted, weight)
        first = at.ep * cut.whole[0] if cut.stacked else 0
        pieces = [
            ShardBox(slab.local, wanted.key, _moved(slab.box, first))
            for slab in slabs(cut.whole, cut.split, cut.parts, self._share(weight, at))
        ]
        return self.content.shard(cut.part, wanted.dtype, pieces)

    def tensor(self, wanted: TargetTensor, weight: str, at: Coordinate) -> Tensor:
        """Return a rank's part as a tensor of its file, with a storage of its own.

        Raises:
            UsageError, UnsupportedError: see `shape`.
        """
        storage = Storage((Elements.all(self.shard(wanted, weight, at)),))
        return self.view(wanted, weight, storage)

    def view(self, wanted: TargetTensor, weight: str, storage: Storage, offset: int = 0) -> Tensor:
        """Return a rank's part as a tensor that begins at an element of a storage."""
        cut = self._cut(wanted, weight)
        return Tensor(storage, wanted.dtype, cut.shape, cut.strides, offset)

    def _cut(self, wanted: TargetTensor, weight: str) -> _Cut:
        place = weight, wanted.name == weight, wanted.shape
        known = self._cuts.get(place)
        if known is None:
            known = self._cuts[place] = self._new_cut(wanted, weight)
        return known

    def _new_cut(self, wanted: TargetTensor, weight: str) -> _Cut:
        whole, stacked = wanted.shape, is_stacked(weight) and len(wanted.shape) == 3
        if stacked:
            whole = (whole[0] // self._grid.ep, *whole[1:])
        parts = self._grid.etp if is_expert(weight) else self._grid.tp
        split = self._split(wanted, weight, parts)
        try:
            part = part_shape(whole, split, parts)
        except UsageError as error:
            raise UsageError(
                f"{wanted.key}: {error.message} tensor ranks", tensor=wanted.key
            ) from error
        shape = _flat(part, weight) if stacked else part
        return _Cut(whole, split, parts, part, shape, dense_strides(shape), stacked)

    def _share(self, weight: str, at: Coordinate) -> int:
        """Return which part a rank has."""
        return self._expert_shares[at.tp, at.ep] if is_expert(weight) else at.tp

    def _split(self, wanted: TargetTensor, weight: str, parts: int) -> Split:
        """Return how a tensor is cut; numbers such as a step are the same on every rank."""
        number = wanted.name != weight and wanted.shape != self.content.tensors[weight].shape
        return REPLICATED if parts == 1 or number else self._rules.find(weight).split


def _moved(box: Box, rows: int) -> Box:
    if not rows:
        return box
    return Box((box.offsets[0] + rows, *box.offsets[1:]), box.sizes)


def _flat(shape: tuple[int, ...], weight: str) -> tuple[int, ...]:
    """Return the two axes under which a file has the experts of a rank (see `by_expert`)."""
    experts, inner, out = shape
    flat = (inner, experts * out) if weight.endswith("1") else (experts * inner, out)
    assert prod(flat) == prod(shape)
    return flat


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
