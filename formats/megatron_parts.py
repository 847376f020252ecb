"""What one rank of a legacy Megatron checkpoint holds of each tensor of the whole model."""

from __future__ import annotations

from math import prod

from ftckpt.assembly import dense_strides
from ftckpt.checkpoint import Box
from ftckpt.errors import UsageError
from ftckpt.rules import Rules
from ftckpt.sharding import REPLICATED, Split, part_shape, slabs
from ftckpt.transfer.content import Content, Part, Shard, Wanted
from ftckpt.transfer.layout import Elements

from .megatron_names import is_expert, is_stacked
from .megatron_ranks import Coordinate, Grid
from .torch_tree import Storage, Tensor


class Parts:
    """How tensors are cut over the ranks of one layout."""

    def __init__(self, content: Content, grid: Grid, rules: Rules) -> None:
        self.content = content
        self._grid = grid
        self._rules = rules
        self._expert_shares = grid.expert_parts()

    def shape(self, wanted: Wanted, weight: str) -> tuple[int, ...]:
        """Return the shape in which every rank's file has its part.

        Args:
            wanted: the whole tensor: a weight, or state of one.
            weight: name of the weight.

        Raises:
            UsageError: it cannot be divided; the message has its name.
            UnsupportedError: no rule says how it is divided.
        """
        shape = self._whole(wanted, weight)
        parts, _ = self._share(weight, Coordinate(0, 0, 0))
        try:
            cut = part_shape(shape, self._split(wanted, weight, parts), parts)
        except UsageError as error:
            raise UsageError(
                f"{wanted.key}: {error.message} tensor ranks", tensor=wanted.key
            ) from error
        return _flat(cut, weight) if self._stacked(wanted, weight) else cut

    def shard(self, wanted: Wanted, weight: str, at: Coordinate) -> Shard:
        """Return a rank's part; of experts that lie in one tensor with the experts as first axis.

        Raises:
            UsageError, UnsupportedError: see `shape`.
        """
        whole = self._whole(wanted, weight)
        parts, share = self._share(weight, at)
        split = self._split(wanted, weight, parts)
        first = at.ep * whole[0] if self._stacked(wanted, weight) else 0
        pieces = [
            Part(slab.local, wanted.key, _moved(slab.box, first))
            for slab in slabs(whole, split, parts, share)
        ]
        return self.content.shard(part_shape(whole, split, parts), wanted.dtype, pieces)

    def tensor(self, wanted: Wanted, weight: str, at: Coordinate) -> Tensor:
        """Return a rank's part as a tensor of its file, with a storage of its own.

        Raises:
            UsageError, UnsupportedError: see `shape`.
        """
        storage = Storage((Elements.all(self.shard(wanted, weight, at)),))
        return self.view(wanted, weight, storage)

    def view(self, wanted: Wanted, weight: str, storage: Storage, offset: int = 0) -> Tensor:
        """Return a rank's part as a tensor that begins at an element of a storage."""
        shape = self.shape(wanted, weight)
        return Tensor(storage, wanted.dtype, shape, dense_strides(shape), offset)

    def _whole(self, wanted: Wanted, weight: str) -> tuple[int, ...]:
        """Return the shape that is divided over tensor ranks: of an expert rank's own experts."""
        if not self._stacked(wanted, weight):
            return wanted.shape
        return (wanted.shape[0] // self._grid.ep, *wanted.shape[1:])

    def _stacked(self, wanted: Wanted, weight: str) -> bool:
        return is_stacked(weight) and len(wanted.shape) == 3

    def _share(self, weight: str, at: Coordinate) -> tuple[int, int]:
        """Return over how many ranks a tensor is divided, and which part a rank has."""
        if is_expert(weight):
            return self._grid.etp, self._expert_shares[at.tp, at.ep]
        return self._grid.tp, at.tp

    def _split(self, wanted: Wanted, weight: str, parts: int) -> Split:
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
