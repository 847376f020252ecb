"""Averages of weights that no word in the name calls so, by their values.

`net_s_3000.pth` beside `net_g_3000.pth` has the same tensors and other values: so have the two
generators of a CycleGAN, of which each is half a save, and weights with their moving average. Two
networks that were begun apart are far from each other. An average is drawn to the weights, which go
ahead of it, so that it is nearer to their last save than they are to its own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import combinations

from ftckpt.checkpoint import Checkpoint, Kind, TensorInfo
from ftckpt.errors import FtckptError

from .listing import open_part
from .roots import Root
from .siblings import Looked

# Tensors that are compared, the largest; and elements of each, from its middle.
_TENSORS, _ELEMENTS = 4, 1024
# Series that are compared: a root of as many kinds of files is not one run.
_SERIES = 8
# Elements that moved each by its own length: of weights that all move alike, any two seem drawn.
_WAYS = 16
# The cosine between the way that an average went and the way from it to the weights.
_DRAWN = 0.5
_CODES = {"float64": "d", "float32": "f", "float16": "e"}
_MEMO = "averages by their values"
_Numbers = tuple[int, ...]
_Shape = tuple[str, tuple[int, ...]]
Members = Mapping[str, Mapping[_Numbers, Looked]]


def averaged_series(root: Root, members: Members) -> frozenset[str]:
    """Return the series whose saves are averages of those of another series.

    Args:
        root: of all.
        members: of each series without steps of its own, its saves by their numbers.
    """
    memo: dict[frozenset[str], frozenset[str]] = root.memo.setdefault(_MEMO, {})
    names = frozenset(members)
    if names not in memo:
        found = set[str]()
        shapes = {name: _newest_shapes(root, members[name]) for name in sorted(members)[:_SERIES]}
        for one, other in combinations(shapes, 2):
            if not shapes[one] or shapes[one] != shapes[other]:
                continue
            average = _average_of_two(root, members[one], members[other])
            if average is not None:
                found.add((one, other)[average])
        memo[names] = frozenset(found)
    return memo[names]


def _newest_shapes(root: Root, own: Mapping[_Numbers, Looked]) -> frozenset[_Shape]:
    newest = max((numbers for numbers, one in own.items() if one.error is None), default=None)
    try:
        return frozenset() if newest is None else _shapes(_opened(root, own[newest]))
    except FtckptError:
        return frozenset()


def _average_of_two(
    root: Root, first: Mapping[_Numbers, Looked], second: Mapping[_Numbers, Looked]
) -> int | None:
    """Return 0 or 1 for the series that is an average of the other; None if neither is."""
    sound = [
        numbers
        for numbers in sorted(first.keys() & second.keys(), reverse=True)
        if first[numbers].error is None and second[numbers].error is None
    ]
    if len(sound) < 2:
        return None
    now, before = sound[:2]
    try:
        opened = [_opened(root, one[at]) for one in (first, second) for at in (now, before)]
        if len({_shapes(one) for one in opened}) != 1:
            return None
        samples = _samples(opened)
    except FtckptError:
        return None
    if len(set(map(len, samples))) != 1:
        return None
    a, a_before, b, b_before = samples
    if any(
        len({x - y for x, y in zip(*ends, strict=True)}) < _WAYS
        for ends in ((a, a_before), (b, b_before))
    ):
        return None
    moved = _distance(a, a_before), _distance(b, b_before)
    if not all(moved) or not all(map(math.isfinite, (*a, *a_before, *b, *b_before))):
        return None  # one of them stands still: a reference, or a copy
    ahead, behind = _distance(b, a_before), _distance(a, b_before)
    if ahead == behind or _distance(a, b) == 0:
        return None
    average = 1 if ahead < behind else 0
    own, own_before, weights = (b, b_before, a) if average else (a, a_before, b)
    near = _distance(a, b) < min(moved)
    drawn = _cosine(own, own_before, weights) >= _DRAWN
    return average if near or drawn else None


def _opened(root: Root, looked: Looked) -> Checkpoint:
    assert looked.child is not None
    return open_part(root.store, looked.child.part)


def _shapes(checkpoint: Checkpoint) -> frozenset[_Shape]:
    weights = (one for one in checkpoint.tensors.items() if one[1].kind is Kind.PARAM)
    return frozenset((key, info.shape) for key, info in weights)


def _samples(opened: Sequence[Checkpoint]) -> list[list[float]]:
    """Return some elements of the largest weights, of the same ones of each."""
    keys = [key for key, _ in _shapes(opened[0])]
    every = [all(_is_plain(one.tensors[key]) for one in opened) for key in keys]
    plain = [key for key, held in zip(keys, every, strict=True) if held]
    largest = sorted(plain, key=lambda key: (-opened[0].tensors[key].numel, key))[:_TENSORS]
    return [[x for key in largest for x in _elements(one, one.tensors[key])] for one in opened]


def _is_plain(info: TensorInfo) -> bool:
    known = info.dtype.name in _CODES or info.dtype.name == "bfloat16"
    return known and len(info.pieces) == 1 and info.pieces[0].flat is None


def _elements(checkpoint: Checkpoint, info: TensorInfo) -> list[float]:
    payload = checkpoint.payload(info.pieces[0])
    if payload.strides is not None or payload.transforms:
        return []
    size, count = info.dtype.itemsize, min(info.numel, _ELEMENTS)
    start = payload.extent.offset + (info.numel - count) // 2 * size
    data = checkpoint.source.read(payload.extent.file, start, count * size)
    if info.dtype.name == "bfloat16":
        halves = (data[at : at + 2] for at in range(0, len(data), 2))
        data = b"".join(b"\0\0" + half for half in halves)
    return list(struct.unpack(f"<{count}{_CODES.get(info.dtype.name, 'f')}", data))


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return math.dist(one, other)


def _cosine(end: Sequence[float], start: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine between the ways from `start` to `end` and to `other`."""
    went = [e - s for e, s in zip(end, start, strict=True)]
    way = [o - s for o, s in zip(other, start, strict=True)]
    length = math.hypot(*went) * math.hypot(*way)
    return math.fsum(w * y for w, y in zip(went, way, strict=True)) / length if length else 0.0
