"""Hold the optimizer's state to the weights that it is of.

A moment has the shape of its parameter, and stands beside it; where one of a pair is there and the
other not, or the weight is gone, something was lost. What a trainer may have left out on purpose is
a warning, and so are moments that several parameters have in a smaller shape: optimizers of low
rank keep those, and some keep a mean over an axis or one number.
"""

from __future__ import annotations

import re
from collections import Counter as Count
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind, TensorInfo
from ftckpt.checkpoint.names import record_names
from ftckpt.checkpoint.optimizer_states import named_state
from ftckpt.errors import ExitCode
from ftckpt.findings import Finding, counted, finding, listed

_Shape = tuple[int, ...]
_PAIR = {Kind.EXP_AVG: None, Kind.EXP_AVG_SQ: None}.keys()
_STATES = _PAIR | {Kind.MASTER}
# Parameters that torch's optimizer numbers: by group and place, or by number alone.
_NUMBERED = r"\d+(?:\.\d+)*"
# What holds a row for each word: its weights may be padded where its moments are not.
_VOCABULARY = re.compile(r"emb|vocab|wte|head|output_layer|output\.weight|shared\.weight")
_OF_OPTIMIZER = re.compile(r"(?:^|[-_.])optim(?:s|izers?)?(?:$|[-_.\d])")
# What describes a model of Hugging Face's.
_MODEL = "config.json"
# How many pairs of shapes are compared where parameters have no names.
_MOST_PAIRS = 100_000


def check_states(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield where moments and masters do not fit the weights, or lack one of their kind."""
    weights: dict[str, TensorInfo] = {}
    states: dict[str, dict[Kind, TensorInfo]] = defaultdict(dict)
    others: list[str] = []
    for info in checkpoint.tensors.values():
        if info.component != "optimizer":
            if info.kind in (Kind.PARAM, Kind.BUFFER):
                weights.setdefault(info.name, info)
        elif info.kind in _STATES:
            states[info.name][info.kind] = info
        else:
            others.append(info.name)
    params = [info.shape for info in weights.values() if info.kind is Kind.PARAM]
    _add_tied(weights, checkpoint)
    named = {name: held for name, held in states.items() if name in weights}
    yield from _other_shapes(named, weights)
    yield from _unlike_pairs([held for name, held in states.items() if name not in weights])
    yield from _half(checkpoint, states, others)
    yield from _bare(states, named, checkpoint.objects)
    if not named and params:
        moments = [
            held[Kind.EXP_AVG].shape
            for name, held in states.items()
            if Kind.EXP_AVG in held and re.fullmatch(_NUMBERED, name)
        ]
        yield from _unknown_shapes(moments, params)


def check_weights(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield that an optimizer's state is there, and nothing of the model that it is of.

    A file, and a folder that is called after the optimizer, may be the whole of what was asked for.
    """
    source = checkpoint.source
    if source.single or source.named or _OF_OPTIMIZER.search(source.name):
        return
    tensors = checkpoint.tensors.values()
    held = {info.name for info in tensors if info.kind in _PAIR or info.component == "optimizer"}
    weights = any(info.kind in (Kind.PARAM, Kind.MASTER) for info in tensors)
    if not held or weights or held & record_names(checkpoint.objects):
        return
    model = next((n for n in source.entries if n.rpartition("/")[2] == _MODEL), "")
    what = "an optimizer's state is here, and no weights"
    if model:
        what = f"{what}: {model} describes the model that is not there"
    found = finding("no-weights", what, file=model or None)
    yield replace(found, code=ExitCode.INCOMPLETE) if model else found


def _add_tied(weights: dict[str, TensorInfo], checkpoint: Checkpoint) -> None:
    """Add weights by their other names: an optimizer may know a tied one by either."""
    tensors = checkpoint.tensors
    for pair in checkpoint.aliases.items():
        names = [tensors[key].name if key in tensors else key for key in pair]
        for info in [weights[name] for name in names if name in weights]:
            if info.key in pair:
                for name in names:
                    weights.setdefault(name, info)


class _Smaller(NamedTuple):
    """A state that is smaller than what it is held to; `cut` as no optimizer makes it so."""

    what: str
    state: TensorInfo
    cut: bool


def _other_shapes(
    named: Mapping[str, Mapping[Kind, TensorInfo]], weights: Mapping[str, TensorInfo]
) -> Iterator[Finding]:
    """Yield states of another shape than their weight."""
    padded = _padded(named, weights)
    smaller: list[_Smaller] = []
    for name, held in named.items():
        weight = weights[name].shape
        for kind, info in held.items() if name not in padded else ():
            if info.shape == weight or info.numel <= 1:
                continue
            what = f"{kind} of {name} is {list(info.shape)}, the weight {list(weight)}"
            if _is_smaller(info.shape, weight):
                smaller.append(_Smaller(what, info, _is_cut(info, weight)))
            else:
                yield finding("shape-mismatch", what, tensor=info.key)
    yield from _all_smaller(smaller, "states of the optimizer are smaller than their weights")


def _unlike_pairs(states: Sequence[Mapping[Kind, TensorInfo]]) -> Iterator[Finding]:
    """Yield the few pairs of moments that differ in shape; where most do, the optimizer does so.

    Args:
        states: of parameters whose weights are not known.
    """
    pairs = [[held[kind] for kind in _PAIR] for held in states if held.keys() >= _PAIR]
    unlike = [(a, b) for a, b in pairs if a.shape != b.shape and min(a.numel, b.numel) > 1]
    smaller: list[_Smaller] = []
    for one, other in unlike if 2 * len(unlike) < len(pairs) else ():
        what = f"of {one.name}, {one.kind} is {list(one.shape)}, {other.kind} {list(other.shape)}"
        if _is_smaller(other.shape, one.shape):
            smaller.append(_Smaller(what, other, _is_cut(other, one.shape)))
        elif _is_smaller(one.shape, other.shape):
            smaller.append(_Smaller(what, other, cut=True))
        else:
            yield finding("shape-mismatch", what, tensor=other.key)
    yield from _all_smaller(smaller, "pairs of moments differ in shape")


def _is_smaller(shape: _Shape, whole: _Shape) -> bool:
    """Say whether a shape is shorter along the axes of another, or lacks some of them."""
    if len(shape) == len(whole):
        return all(one <= other for one, other in zip(shape, whole, strict=True))
    left = iter(whole)
    return all(size in left for size in shape)


def _is_cut(state: TensorInfo, whole: _Shape) -> bool:
    """Say whether it lacks too little for a low rank or a mean, or an axis as no mean does."""
    if len(state.shape) != len(whole):
        return state.kind is not Kind.EXP_AVG_SQ  # of each row of an embedding, for example
    return all(2 * one > other for one, other in zip(state.shape, whole, strict=True))


def _all_smaller(found: Sequence[_Smaller], what: str) -> Iterator[Finding]:
    """Yield damage where one alone is cut; several are as some optimizers make them, a warning."""
    if len(found) == 1 and found[0].cut:
        yield finding("shape-mismatch", found[0].what, tensor=found[0].state.key)
    elif found:
        said = f"{len(found)} {what}: {found[0].what}" if len(found) > 1 else found[0].what
        yield finding("state-unknown", said, tensor=found[0].state.key)


def _padded(
    named: Mapping[str, Mapping[Kind, TensorInfo]], weights: Mapping[str, TensorInfo]
) -> Collection[str]:
    """Return the parameters whose weights alone are padded: those that have a row for each word.

    All have the same rows, and so have all states of each; the rows that were added are fewer.
    """
    rows: dict[str, tuple[int, int]] = {}
    for name, held in named.items():
        weight = weights[name].shape
        shapes = {info.shape for info in held.values() if info.numel > 1}
        if len(shapes) == 1 and _VOCABULARY.search(name):
            (shape,) = shapes
            if shape[1:] == weight[1:] and shape[:1] < weight[:1] < (2 * shape[0],):
                rows[name] = (weight[0], shape[0])
    return rows if len(set(rows.values())) == 1 else ()


def _half(
    checkpoint: Checkpoint,
    states: Mapping[str, Mapping[Kind, TensorInfo]],
    others: Collection[str],
) -> Iterator[Finding]:
    """Yield parameters with one moment where others have two.

    Factored second moments have other names, and stand for the one that is not there: a state that
    no parameter with both has, other than a counter. A mixed optimizer has groups with one moment.
    """
    half = [n for n, held in states.items() if len(_PAIR & held.keys()) == 1]
    if not half or not any(held.keys() >= _PAIR for held in states.values()):
        return
    own: dict[str, set[str]] = defaultdict(set)
    usual: set[str] = set()
    for other in others:
        one = named_state(other, states)
        if states.get(one.parameter, {}).keys() >= _PAIR:
            usual.add(one.leaf)
        elif one.state is None or one.state.moment:
            own[one.parameter].add(one.leaf)
    half = [n for n in half if not own.get(n, set()) - usual]
    single = [n for n in half if Kind.EXP_AVG in states[n]]  # no optimizer keeps a second alone
    both = [n for n, held in states.items() if held.keys() >= _PAIR]
    from ftckpt.checkpoint.optimizer_groups import of_other_groups  # few lack one

    mixed = of_other_groups(single, both, checkpoint)
    half = [n for n in half if n not in mixed]
    if half:
        what = f"one of two moments of {listed(half, 3)} is not there; others have both"
        yield finding("state-unknown", what, tensor=half[0])


def _bare(
    states: Mapping[str, Mapping[Kind, TensorInfo]],
    named: Collection[str],
    objects: Collection[str],
) -> Iterator[Finding]:
    """Yield parameters of which neither weight nor master is there, where others have weights.

    Args:
        states: what the optimizer keeps of each parameter.
        named: those with a weight.
        objects: names of objects, one of which may be the record of a tensor subclass.
    """
    bare = [n for n, held in states.items() if n not in named and Kind.MASTER not in held]
    if not bare:
        return
    own = {name for name in states if not re.fullmatch(_NUMBERED, name)}
    known = {*named} | (record_names(objects) & own)
    bare = [name for name in bare if name not in known]
    if bare and known:
        what = f"the optimizer has moments of {listed(bare, 3)}, and no weight of that name is here"
        yield finding("state-unknown", what, tensor=bare[0])


def _unknown_shapes(moments: Collection[_Shape], params: Collection[_Shape]) -> Iterator[Finding]:
    """Yield moments without names whose shapes no weight has.

    A model may hold in one parameter what its file has in several: fused experts, joined rows.
    """
    more = Count(moments)
    more.subtract(Count(params))
    left = Count({shape: -count for shape, count in more.items() if count < 0})
    if sum(c > 0 for c in more.values()) * len(left) > _MOST_PAIRS:
        return
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
