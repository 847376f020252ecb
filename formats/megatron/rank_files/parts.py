"""Compute the part of each whole tensor that one legacy Megatron rank holds."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.checkpoint.rules import Rules
from ftckpt.checkpoint.sharding import REPLICATED, Split, part_shape, slabs
from ftckpt.errors import UsageError
from ftckpt.formats.torch_files.write_tree import Storage, Tensor
from ftckpt.transfer.content import Content, Shard, ShardBox, TargetTensor
from ftckpt.transfer.layout import Elements

from .grid import Coordinate, MegatronGrid
from .tensor_names import is_expert, is_stacked


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
