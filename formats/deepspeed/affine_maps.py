"""Read affine maps: which blocks of a parameter each tensor-parallel rank holds, and where.

`universal_checkpoint_info["affine_map"]` maps a pattern of names to the shape of the whole
parameter and, for each rank, the shape of its own tensor and the pieces that make it up. A piece is
a view of both, by offset and strides in elements, and lists all ranks that hold it:

    {"logical_shape": [4, 2], "ranks": {0: {"shard_shape": [3, 2], "pieces": [
        {"shape": [2, 2], "source": [0, [2, 1]], "dest": [0, [2, 1]], "locations": [0]},
        {"shape": [1, 2], "source": [6, [2, 1]], "dest": [4, [2, 1]], "locations": [0, 1]}]}, …}}

Source: `deepspeed/checkpoint/affine.py` and `affine_ir_spec.md` of DeepSpeed 0.19.8, version 1 of
the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.sharding import Slab
from ftckpt.errors import UnsupportedError
from ftckpt.formats.deepspeed.zero.partition import Shape

VERSION = 1
# Pieces of one rank; real maps have a few, those of interleaved heads one for each head.
_MOST = 65_536


class AffinePart(NamedTuple):
    """What one rank holds of a parameter.

    Attributes:
        shape: of its own tensor.
        slabs: blocks of the parameter and where each lies in that tensor, in its order.
        replicas: for each slab, how many ranks before this one hold it too.
    """

    shape: Shape
    slabs: tuple[Slab, ...]
    replicas: tuple[int, ...]


class AffineMap(NamedTuple):
    """The shape of a whole parameter, and the part of each rank."""

    shape: Shape
    parts: tuple[AffinePart, ...]


def read_map(record: Any, name: str) -> AffineMap:
    """Read the map of one parameter.

    Args:
        record: as stored.
        name: of the parameter, for messages.

    Raises:
        UnsupportedError: it is malformed, scales a piece, or its pieces are not blocks that lie one
            after the other along one axis.
    """
    record = record if isinstance(record, dict) else {}
    shape, ranks = _shape(record.get("logical_shape"), name), record.get("ranks")
    if not isinstance(ranks, dict) or [*ranks] != [*range(len(ranks))]:
        raise _odd(name, "does not list the ranks from 0")
    return AffineMap(shape, tuple(_part(ranks[n], n, shape, name) for n in range(len(ranks))))


def _part(record: Any, rank: int, shape: Shape, name: str) -> AffinePart:
    record = record if isinstance(record, dict) else {}
    own, pieces = _shape(record.get("shard_shape"), name), record.get("pieces")
    if not isinstance(pieces, (list, tuple)) or len(pieces) > _MOST or len(own) != len(shape):
        raise _odd(name, f"has no pieces of rank {rank}")
    found: list[tuple[Slab, int]] = []
    for piece in pieces:
        piece = piece if isinstance(piece, dict) else {}
        if piece.get("scale", 1.0) != 1.0:
            raise _odd(name, "scales a piece, which its moments would not survive")
        sizes, holders = _shape(piece.get("shape"), name), piece.get("locations")
        if not isinstance(holders, (list, tuple)) or rank not in holders:
            raise _odd(name, f"has a piece of rank {rank} that lies on other ranks")
        if not all(type(n) is int for n in holders):
            raise _odd(name, "has a piece on ranks that are no numbers")
        source = _box(piece.get("source"), sizes, shape, name)
        slab = Slab(source, _box(piece.get("dest"), sizes, own, name))
        if source.volume:
            found.append((slab, sum(n < rank for n in {*holders})))
    found.sort(key=lambda one: one[0].local.offsets)
    _require_a_row([slab.local for slab, _ in found], own, name)
    return AffinePart(own, tuple(s for s, _ in found), tuple(r for _, r in found))


def _box(view: Any, sizes: Shape, shape: Shape, name: str) -> Box:
    """Return the block of a dense tensor that a view of it is."""
    offset, strides = view if isinstance(view, (list, tuple)) and len(view) == 2 else (None, None)
    steps: list[int] = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    strides = strides if isinstance(strides, (list, tuple)) else []
    dense = len(strides) == len(sizes) == len(shape) and all(
        size <= 1 or stride == step
        for size, stride, step in zip(sizes, strides, steps, strict=True)
    )
    if type(offset) is not int or offset < 0 or not dense:
        raise _odd(name, "has a piece that is not a block of the tensor")
    if 0 in sizes:
        return Box((0,) * len(shape), sizes)
    offsets = []
    for step in steps:
        at, offset = divmod(offset, step) if step else (0, offset)
        offsets.append(at)
    if any(at + size > n for at, size, n in zip(offsets, sizes, shape, strict=True)):
        raise _odd(name, "has a piece that reaches beyond the tensor")
    return Box(tuple(offsets), sizes)


def _require_a_row(boxes: Sequence[Box], shape: Shape, name: str) -> None:
    """Require that boxes lie one after the other along one axis and fill a tensor."""
    axes = {d for box in boxes for d, n in enumerate(shape) if box.sizes[d] != n}
    axis = next(iter(axes), 0)
    at = 0
    for box in boxes:
        at += box.sizes[axis] if shape and box.offsets[axis] == at else 0
    whole = at == shape[axis] if shape else len(boxes) == 1
    if len(axes) > 1 or (0 not in shape and not whole) or (not axes and len(boxes) > 1):
        raise _odd(name, "has pieces that do not fill a rank's tensor along one axis")


def _shape(value: Any, name: str) -> Shape:
    if not isinstance(value, (list, tuple)) or not all(
        type(n) is int and 0 <= n < 1 << 48 for n in value
    ):
        raise _odd(name, "has a shape that is none")
    return tuple(value)


def _odd(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(f"the affine map of {name} {what}", tensor=name)
