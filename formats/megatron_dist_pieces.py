"""Pieces of logical tensors that Megatron's torch_dist stores in another form.

None of them copies: each finds the item, the part of the global tensor, and the element of the
item with which it begins, when it is asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from math import prod

from ftckpt.checkpoint import Box, Piece

from .dcp_tensors import LazyPieces

Numbers = tuple[int, ...]


class Stack:
    """A stored tensor whose leading axes count layers or experts."""

    def __init__(self, stored: LazyPieces, axes: int) -> None:
        """Keep the pieces of the stored tensor, all inside its first `axes` axes."""
        self.stored = stored
        self.axes = axes

    def row(self, at: Numbers) -> Row:
        """Return the pieces of one layer, or of one expert of it."""
        return Row(self, at)

    @cached_property
    def rows(self) -> Mapping[Numbers, Sequence[tuple[int, int]]]:
        """Place on the leading axes -> stored pieces that reach it, and the row of each there."""
        found: dict[Numbers, list[tuple[int, int]]] = defaultdict(list)
        for index in range(len(self.stored)):
            offsets, sizes = self.stored.box(index)
            reach = (range(o, o + s) for o, s in zip(offsets, sizes[: self.axes], strict=False))
            for row, at in enumerate(product(*reach)):
                found[at].append((index, row))
        return found


class Row(LazyPieces):
    """The pieces of one row of a stack, without the leading axes."""

    __slots__ = ("_at", "_stack")

    def __init__(self, stack: Stack, at: Numbers) -> None:
        self._stack = stack
        self._at = at

    def __len__(self) -> int:
        return len(self._stack.rows.get(self._at, ()))

    def box(self, index: int) -> Box:
        """Return the box of one piece in the row."""
        stored, _ = self._stack.rows[self._at][index]
        offsets, sizes = self._stack.stored.box(stored)
        return Box(offsets[self._stack.axes :], sizes[self._stack.axes :])

    def piece(self, index: int) -> Piece:
        """Return one piece; see `LazyPieces.piece`."""
        stored, row = self._stack.rows[self._at][index]
        box = self.box(index)
        piece = self._stack.stored.piece(stored)
        return piece._replace(box=box, first=piece.first + row * box.volume)


class Joined(LazyPieces):
    """The pieces of tensors of one shape that follow each other along the first axis."""

    __slots__ = ("_parts", "_rows")

    def __init__(self, parts: Sequence[Sequence[Piece]], rows: int) -> None:
        """Keep the parts, each `rows` long on the first axis."""
        self._parts = parts
        self._rows = rows

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def box(self, index: int) -> Box:
        """Return the box of one piece in the whole."""
        return self.piece(index).box

    def piece(self, index: int) -> Piece:
        """Return one piece; see `LazyPieces.piece`."""
        begin = 0
        for part in self._parts:
            if index < len(part):
                piece = part[index]
                offsets, sizes = piece.box
                return piece._replace(box=Box((offsets[0] + begin, *offsets[1:]), sizes))
            index -= len(part)
            begin += self._rows
        raise IndexError(index)


class Grid(LazyPieces):
    """The pieces of a tensor that is stored by shards, each flat (`fully_sharded_model_space`).

    A tensor of shape [X, Y], divided over a grid of x by y shards, is stored with shape
    [x, y, X/x * Y/y]: where in the grid, and which element of the shard in C order.
    """

    __slots__ = ("_stored", "shard")

    def __init__(self, stored: LazyPieces, shard: Numbers) -> None:
        """Keep the stored pieces and the shape of one shard."""
        self._stored = stored
        self.shard = shard

    def __len__(self) -> int:
        return len(self._stored)

    def box(self, index: int) -> Box:
        """Return the box of the shard that one piece is a part of."""
        offsets = self._stored.box(index).offsets
        starts = tuple(at * size for at, size in zip(offsets[:-1], self.shard, strict=True))
        return Box(starts, self.shard)

    def piece(self, index: int) -> Piece:
        """Return one piece, a flat range of its shard; see `LazyPieces.piece`."""
        offsets, sizes = self._stored.box(index)
        flat = (offsets[-1], offsets[-1] + sizes[-1])
        return self._stored.piece(index)._replace(box=self.box(index), flat=flat)


def shard_shape(stored: Sequence[int], shape: Sequence[int]) -> Numbers | None:
    """Return the shape of one shard of a tensor of `shape` that is stored as a grid.

    None where `stored` is no such grid.
    """
    grid = stored[:-1]
    if len(grid) != len(shape) or any(g < 1 or n % g for g, n in zip(grid, shape, strict=True)):
        return None
    shard = tuple(n // g for g, n in zip(grid, shape, strict=True))
    return shard if prod(shard) == stored[-1] else None
