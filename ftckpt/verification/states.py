"""Hold the optimizer's state to the weights that it is of.

A moment has the shape of its parameter, and stands beside it; where one of a pair is there and the
other not, or the weight is gone, something was lost. What a trainer may have left out on purpose is
a warning. A vocabulary that is padded in the weights alone makes them longer, never shorter.
"""

from __future__ import annotations

import re
from collections import Counter as Count
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from math import prod

from ftckpt.checkpoint import Checkpoint, Kind, TensorInfo
from ftckpt.findings import Finding, counted, finding, listed

_Shape = tuple[int, ...]
_PAIR = {Kind.EXP_AVG: None, Kind.EXP_AVG_SQ: None}.keys()
_STATES = _PAIR | {Kind.MASTER}
# Parameters that torch's optimizer numbers: by group and place, or by number alone.
_NUMBERED = re.compile(r"\d+(?:\.\d+)*")


def check_states(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield where moments and masters do not fit the weights, or lack one of their kind."""
    weights: dict[str, TensorInfo] = {}
    states: dict[str, dict[Kind, TensorInfo]] = defaultdict(dict)
    others: set[str] = set()
    for info in checkpoint.tensors.values():
        if info.component != "optimizer":
            if info.kind in (Kind.PARAM, Kind.BUFFER):
                weights.setdefault(info.name, info)
        elif info.kind in _STATES:
            states[info.name][info.kind] = info
        else:
            others.add(info.name)
    named = {name: held for name, held in states.items() if name in weights}
    yield from _other_shapes(named, weights)
    yield from _unlike_pairs(states)
    yield from _half(states, others)
    yield from _bare(states, named)
    params = [info.shape for info in weights.values() if info.kind is Kind.PARAM]
    if not named and params:
        moments = [
            held[Kind.EXP_AVG].shape
            for name, held in states.items()
            if Kind.EXP_AVG in held and _NUMBERED.fullmatch(name)
        ]
        yield from _unknown_shapes(moments, params)


def _other_shapes(
    named: Mapping[str, Mapping[Kind, TensorInfo]], weights: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """Yield states of another shape than their weight; several that are smaller are a warning.

    Optimizers of low rank keep smaller moments, and some keep one number of each parameter.
    """
    smaller: list[tuple[str, TensorInfo]] = []
    for name, held in named.items():
        weight = weights[name].shape
        for kind, info in held.items():
            if info.shape == weight or info.numel <= 1 or _padded(weight, info.shape):
                continue
            what = f"{kind} of {name} is {list(info.shape)}, the weight {list(weight)}"
            fits = len(weight) == len(info.shape)
            if fits and all(one <= other for one, other in zip(info.shape, weight, strict=True)):
                smaller.append((what, info))
            else:
                yield finding("shape-mismatch", what, tensor=info.key)
    if len(smaller) > 1:
        what = f"{len(smaller)} states of the optimizer are smaller than their weights: "
        yield finding("state-unknown", what + smaller[0][0], tensor=smaller[0][1].key)
    elif smaller:
        yield finding("shape-mismatch", smaller[0][0], tensor=smaller[0][1].key)


def _unlike_pairs(states: Mapping[str, Mapping[Kind, TensorInfo]]) -> Iterator[Finding]:
    """Yield the few pairs of moments that differ in shape; where most do, the optimizer does so."""
    pairs = [[held[kind] for kind in _PAIR] for held in states.values() if held.keys() >= _PAIR]
    unlike = [pair for pair in pairs if pair[0].shape != pair[1].shape]
    for one, other in unlike if 2 * len(unlike) < len(pairs) else ():
        what = f"of {one.name}, {one.kind} is {list(one.shape)}, {other.kind} {list(other.shape)}"
        yield finding("shape-mismatch", what, tensor=other.key)


def _padded(weight: _Shape, state: _Shape) -> bool:
    return bool(state) and weight[1:] == state[1:] and weight[:1] > state[:1]


def _half(
    states: Mapping[str, Mapping[Kind, TensorInfo]], others: Collection[str]
) -> Iterator[Finding]:
    """Yield parameters with one moment where others have two.

    Factored second moments have other names, and stand for the one that is not there.
    """
    if not any(held.keys() >= _PAIR for held in states.values()):
        return
    half = [n for n, held in states.items() if len(_PAIR & held.keys()) == 1 and n not in others]
    if half:
        what = f"one of two moments of {listed(half, 3)} is not there; all others have both"
        yield finding("state-unknown", what, tensor=half[0])


def _bare(
    states: Mapping[str, Mapping[Kind, TensorInfo]], named: Collection[str]
) -> Iterator[Finding]:
    """Yield parameters of which neither weight nor master is there, where others have weights."""
    bare = [n for n, held in states.items() if n not in named and Kind.MASTER not in held]
    if bare and named:
        what = f"the optimizer has moments of {listed(bare, 3)}, and no weight of that name is here"
        yield finding("state-unknown", what, tensor=bare[0])


def _unknown_shapes(moments: Collection[_Shape], params: Collection[_Shape]) -> Iterator[Finding]:
    """Yield moments without names whose shapes no weight has.

    A model may hold in one parameter what its file has in several: fused experts, joined rows.
    """
    more = Count(moments)
    more.subtract(Count(params))
    left = Count({shape: -count for shape, count in more.items() if count < 0})
    strange = []
    for shape, count in ((s, c) for s, c in more.items() if c > 0):
        size = prod(shape)
        parts = ((size // prod(one), held) for one, held in left.items() if _divides(one, size))
        if not any(number <= held for number, held in parts):
            strange += [shape] * count
    if strange:
        shapes = listed([str(list(one)) for one in dict.fromkeys(strange)], 3)
        what = (
            f"{counted(len(strange), 'moment')} of the optimizer ({shapes}) fit no weight: the"
            " weights or the optimizer's state are of another model, or not all were saved"
        )
        yield finding("state-unknown", what)


def _divides(shape: _Shape, size: int) -> bool:
    return 0 < prod(shape) <= size and size % prod(shape) == 0
