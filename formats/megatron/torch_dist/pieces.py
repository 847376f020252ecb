"""Pieces of logical tensors that Megatron's torch_dist stores in another form.

None of them copies: each finds the item, the part of the global tensor, and the element of the
item with which it begins, when it is asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from operator import add

from ftckpt.checkpoint import Box, Piece
from ftckpt.formats.torch_files.lazy_pieces import LazyPieces

Numbers = tuple[int, ...]


# One stored piece, and which row of it.
_Place = tuple[int, int]
# A chunk of more layers and experts than any network has is somebody's way to fill the memory.
_MOST_ROWS = 1 << 22


def rows_of(stored: LazyPieces, lead: Numbers) -> Mapping[Numbers, LazyPieces] | None:
    """Return the pieces of every row of a stack: of every place on its leading axes.

    A row that no piece reaches is left out. None where a piece leaves the leading axes, which no
    row would show, or is a flat range over several rows.

    Args:
        stored: the pieces of the stack.
        lead: lengths of its leading axes.
    """
    axes = len(lead)
    if isinstance(stored, FlatShardPieces) and any(n != 1 for n in stored.shard[:axes]):
        return None
    one = (1,) * axes
    found: dict[Numbers, list[_Place]] = defaultdict(list)
    reached = 0
    for index in range(len(stored)):
        offsets, sizes = stored.box(index)
        if len(offsets) != len(sizes):
            return None
        begin, count = offsets[:axes], sizes[:axes]
        if count == one:
            found[begin].append((index, 0))
            continue
        reached += prod(count)
        if len(count) != axes or reached > _MOST_ROWS:
            return None
        for row, at in enumerate(product(*map(range, begin, map(add, begin, count)))):
            found[at].append((index, row))
    if any(at >= length for numbers in found for at, length in zip(numbers, lead, strict=True)):
        return None
    return {at: RowPieces(stored, axes, places) for at, places in found.items()}


class RowPieces(LazyPieces):
    """The pieces of one row of a stack, without the leading axes."""

    __slots__ = ("_axes", "_places", "_stored")

    def __init__(self, stored: LazyPieces, axes: int, places: Sequence[_Place]) -> None:
        """Keep which stored pieces reach the row, and at which of their rows."""
        self._stored = stored
        self._axes = axes
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def box(self, index: int) -> Box:
        """Return the box of one piece in the row."""
        offsets, sizes = self._stored.box(self._places[index][0])
        return Box(offsets[self._axes :], sizes[self._axes :])

    def piece(self, index: int) -> Piece:
        """Return one piece; see `LazyPieces.piece`."""
        stored, row = self._places[index]
        box = self.box(index)
        piece = self._stored.piece(stored)
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


class FlatShardPieces(LazyPieces):
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

    None where `stored` is not such a grid.
    """
    grid = stored[:-1]
    if len(grid) != len(shape) or any(g < 1 or n % g for g, n in zip(grid, shape, strict=True)):
        return None
    shard = tuple(n // g for g, n in zip(grid, shape, strict=True))
    return shard if prod(shard) == stored[-1] else None
