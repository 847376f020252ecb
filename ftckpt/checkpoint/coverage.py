"""Check that boxes tile a tensor: every element once, none twice, none outside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from ftckpt.extents import Box

from .pieces import Piece


class Gap(NamedTuple):
    """A fault in a tiling.

    Attributes:
        kind: `hole`, `overlap` or `out-of-bounds` (keys of `ftckpt.findings.KINDS`).
        message: the place in words.
        piece: index of a piece at fault; None for a hole.
    """

    kind: str
    message: str
    piece: int | None


def check_coverage(shape: Sequence[int], pieces: Sequence[Piece]) -> Iterator[Gap]:
    """Yield the faults in the main pieces' tiling of a tensor of `shape`.

    Replicas are not checked (see `check_replicas`). Flat ranges tile their boxes, boxes tile the
    tensor. A tensor without elements has no faults.
    """
    main = [(i, p) for i, p in enumerate(pieces) if p.replica == 0]
    inside = []
    for index, piece in main:
        if _fits(piece.box, shape):
            inside.append((index, piece))
        else:
            yield Gap("out-of-bounds", f"piece {show(piece.box)} leaves {list(shape)}", index)
    boxes: dict[Box, list[tuple[int, Piece]]] = defaultdict(list)
    for index, piece in inside:
        if piece.box.volume:
            boxes[piece.box].append((index, piece))
    for box, group in boxes.items():
        yield from _check_box(box, group)
    covered = sum(box.volume for box in boxes)
    clash = _overlap(list(boxes))
    if clash is not None:
        first, second = clash
        message = f"pieces {show(first)} and {show(second)} overlap"
        yield Gap("overlap", message, boxes[second][0][0])
    elif covered < prod(shape):
        missing = prod(shape) - covered
        yield Gap("hole", f"{missing} of {prod(shape)} elements are in no piece"
                  f"{_where(shape, list(boxes))}", None)  # fmt: skip


def check_replicas(shape: Sequence[int], pieces: Sequence[Piece]) -> Iterator[Gap]:
    """Yield the replicas that leave a tensor of `shape`, or with a flat range their own box."""
    for index, piece in enumerate(pieces):
        if not piece.replica:
            continue
        start, stop = piece.flat or (0, piece.box.volume)
        if not _fits(piece.box, shape):
            yield Gap("out-of-bounds", f"replica {show(piece.box)} leaves {list(shape)}", index)
        elif not 0 <= start <= stop <= piece.box.volume:
            message = f"range [{start}, {stop}) of a replica leaves box {show(piece.box)}"
            yield Gap("out-of-bounds", message, index)


def _check_box(box: Box, group: Sequence[tuple[int, Piece]]) -> Iterator[Gap]:
    """Check that one piece holds the box whole, or flat ranges tile it."""
    if len(group) == 1 and group[0][1].flat is None:
        return
    ranges = sorted((p.flat or (0, box.volume), i) for i, p in group)
    end = 0
    for (start, stop), index in ranges:
        if start < 0 or stop > box.volume or stop < start:
            yield Gap("out-of-bounds", f"range [{start}, {stop}) leaves box {show(box)}", index)
            continue
        if start == stop:
            continue
        if start < end:
            yield Gap("overlap", f"elements [{start}, {min(end, stop)}) of box {show(box)} are in "
                      "two pieces", index)  # fmt: skip
        elif start > end:
            yield Gap("hole", f"elements [{end}, {start}) of box {show(box)} are in no piece", None)
        end = max(end, stop)
    if end < box.volume:
        yield Gap("hole", f"elements [{end}, {box.volume}) of box {show(box)} are in no piece",
                  None)  # fmt: skip


def _fits(box: Box, shape: Sequence[int]) -> bool:
    return len(box.offsets) == len(box.sizes) == len(shape) and all(
        o >= 0 and s >= 0 and o + s <= n
        for o, s, n in zip(box.offsets, box.sizes, shape, strict=True)
    )


def _overlap(boxes: list[Box], axis: int = 0) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None.

    Shards lie in slabs along an axis: boxes of one slab are compared along the next axis, separate
    slabs are not compared. Only boxes that straddle slabs are compared in pairs.
    """
    if len(boxes) < 2:
        return None
    if axis == len(boxes[0].offsets):
        return boxes[0], boxes[1]
    slabs: dict[tuple[int, int], list[Box]] = defaultdict(list)
    for box in boxes:
        slabs[box.offsets[axis], box.sizes[axis]].append(box)
    order = sorted(slabs)
    if all(a[0] + a[1] <= b[0] for a, b in pairwise(order)):
        for slab in slabs.values():
            clash = _overlap(slab, axis + 1)
            if clash is not None:
                return clash
        return None
    ordered = sorted(boxes, key=lambda b: b.offsets[axis])
    active: list[Box] = []
    for box in ordered:
        active = [a for a in active if a.offsets[axis] + a.sizes[axis] > box.offsets[axis]]
        for other in active:
            if _intersect(other, box):
                return other, box
        active.append(box)
    return None


def _intersect(a: Box, b: Box) -> bool:
    return all(
        ao < bo + bs and bo < ao + as_
        for ao, as_, bo, bs in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


def _where(shape: Sequence[int], boxes: list[Box]) -> str:
    """Describe a hole if the boxes are slabs of one axis."""
    for axis in range(len(shape)):
        rest = [n for d, n in enumerate(shape) if d != axis]
        slabs = all([s for d, s in enumerate(b.sizes) if d != axis] == rest for b in boxes)
        if not slabs:
            continue
        end = 0
        for box in sorted(boxes, key=lambda b: b.offsets[axis]):
            if box.offsets[axis] > end:
                return f": rows [{end}, {box.offsets[axis]}) of axis {axis} are missing"
            end = box.offsets[axis] + box.sizes[axis]
        return f": rows [{end}, {shape[axis]}) of axis {axis} are missing"
    return ""


def show(box: Box) -> str:
    """Return a box in words: `[0:4, 8:16]`."""
    spans = ", ".join(f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=False))
    return f"[{spans}]"


def intersection(a: Box, b: Box) -> Box | None:
    """Return the box of the elements in both, or None."""
    offsets, sizes = [], []
    for start, size, other, count in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        first = max(start, other)
        shared = min(start + size, other + count) - first
        if shared <= 0:  # most compared boxes do not meet
            return None
        offsets.append(first)
        sizes.append(shared)
    return Box(tuple(offsets), tuple(sizes))
