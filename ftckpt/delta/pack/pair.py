"""Pair each tensor of the target with its base, and with tensors that predict it.

Match numbered moments to weights by how the two checkpoints changed.

torch's optimizers number their parameters and forget the names, and a file of weights beside them
may have lost the order (safetensors sorts by name). Shapes alone say little: all layers are alike.
But a step of AdamW goes against m / sqrt(v), and one of SGD against its buffer: over a sample of
elements the change of a weight follows its own moments, and is independent of all others. What is
matched is a helper for a prediction like any other: a wrong one would cost room and never a bit.

A match needs, among all weights and all moments of a shape, a correlation of at least `_LEAST` (or
six times what chance gives a small tensor), and at least `_AHEAD` times the next best one, seen
from the weight and seen from the moments. Pairs that are less clear are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.checkpoint import Kind, TensorInfo
from ftckpt.delta.codec.choose_encoding import BLOCK, TINY
from ftckpt.delta.codec.decode import Fill
from ftckpt.delta.codec.words import word_count, words_of
from ftckpt.errors import FtckptError

if TYPE_CHECKING:
    from ftckpt.delta.codec.words import Array


_HELPERS = {
    Kind.PARAM: (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.OTHER),
    Kind.MASTER: (Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.OTHER),
    Kind.EXP_AVG_SQ: (Kind.EXP_AVG,),
}
_BUFFER = ".momentum_buffer"  # torch's SGD keeps it under the parameter's name
_TRAINED = ("model", "optimizer")  # components that one optimizer's rule ties together


class DeltaPair(NamedTuple):
    """One tensor of the target.

    Attributes:
        info: the tensor.
        base: key of the base's tensor of the same shape and type; None where there is none.
        helpers: by kind, the place in the list of pairs of a float32 tensor of the same parameter
            and shape that may help to predict it.
        kin: what the tensors of its parameter have in common (`family`), those that help to
            predict it among them.
    """

    info: TensorInfo
    base: str | None
    helpers: Mapping[Kind, int]
    kin: tuple[str, str]

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        words = words_of(self.info.dtype)
        return -(-word_count(self.info.dtype, self.info.numel) // (BLOCK * words.each))

    def block_nbytes(self, block: int) -> int:
        """Return the bytes of one block's elements."""
        words = words_of(self.info.dtype)
        whole = BLOCK * words.each * words.size
        return min(whole, self.info.nbytes - block * whole)


def pair(
    target: Iterable[TensorInfo],
    base: Mapping[str, TensorInfo],
    renamed: Mapping[str, str] | None = None,
) -> list[DeltaPair]:
    """Return every tensor of the target with what it can be stored against, in the same order.

    Sharding does not matter: tensors are matched by key, and need equal shape and type.

    Args:
        target: its tensors; aliases are left out by the caller.
        base: the base's tensors by key; empty without a base.
        renamed: key in the target -> key in the base, where they differ.
    """
    tensors = list(target)
    renamed = renamed or {}
    places = {
        (family(info), info.kind): number
        for number, info in enumerate(tensors)
        if info.dtype.name == "float32" and (info.kind is not Kind.OTHER or is_momentum(info))
    }
    pairs = []
    for info in tensors:
        key = renamed.get(info.key, info.key)
        held = base.get(key)
        fits = held is not None and (held.shape, held.dtype) == (info.shape, info.dtype)
        helpers = {}
        for kind in _HELPERS.get(info.kind, ()):
            number = places.get((family(info), kind))
            if number is not None and tensors[number].shape == info.shape:
                helpers[kind] = number
        pairs.append(DeltaPair(info, key if fits else None, helpers, family(info)))
    return pairs


def family(info: TensorInfo) -> tuple[str, str]:
    """Return what the tensors of one parameter have in common, and no others."""
    name = info.name.removesuffix(_BUFFER) if is_momentum(info) else info.name
    return ("" if info.component in _TRAINED else info.component, name)


def is_momentum(info: TensorInfo) -> bool:
    """Say whether a tensor is the momentum buffer of a parameter."""
    return info.component == "optimizer" and info.name.endswith(_BUFFER)


_RUNS, _RUN = 4, 256  # elements of a sample
_LEAST = 0.3
_CHANCE = 6.0  # standard deviations of the correlation of two independent samples
_AHEAD = 2.0
_EPS = 1e-8
# Tensors of one shape on one side: their correlations are one matrix in memory.
MOST = 2048

_MOMENTS = (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
_BUFFERS = (Kind.OTHER,)


class Task(NamedTuple):
    """Tensors that are sampled together.

    Attributes:
        weight: place of a weight in the list of pairs; None for moments.
        moments: by kind, places of the moments (or the momentum buffer) of one number.
    """

    weight: int | None
    moments: Mapping[Kind, int]


class Sampled(NamedTuple):
    """What was sampled for one task.

    Attributes:
        task: which.
        directions: each of mean 0 and length 1, float32: the change of a weight; or where moments
            lead, of the target and of the base. None where nothing can be told from it.
    """

    task: Task
    directions: tuple[Array | None, ...]


def candidates(pairs: Sequence[DeltaPair]) -> list[tuple[list[Task], list[Task]]]:
    """Return, shape by shape, the weights without moments and the moments without weights.

    Only what is float32 on both sides counts, and shapes of which there are both.
    """
    named = {pair.kin for pair in pairs if pair.info.kind in (Kind.PARAM, Kind.MASTER)}
    weights: dict[tuple[int, ...], list[Task]] = {}
    numbered: dict[tuple[str, str], dict[Kind, int]] = {}
    for number, pair in enumerate(pairs):
        info = pair.info
        if info.dtype.name != "float32" or pair.base is None or info.nbytes <= TINY:
            continue
        if info.kind is Kind.PARAM and info.component == "model" and not pair.helpers:
            weights.setdefault(info.shape, []).append(Task(number, {}))
        elif info.kind in (*_MOMENTS, *_BUFFERS) and pair.kin not in named:
            numbered.setdefault(pair.kin, {})[info.kind] = number
    moments: dict[tuple[int, ...], list[Task]] = {}
    for places in numbered.values():
        kept = {kind: n for kind, n in places.items() if kind in _MOMENTS} or places
        shapes = {pairs[n].info.shape for n in kept.values()}
        if len(shapes) == 1 and tuple(kept) in (_MOMENTS, _MOMENTS[::-1], _BUFFERS):
            moments.setdefault(shapes.pop(), []).append(Task(None, kept))
    return [
        (found, moments[shape])
        for shape, found in weights.items()
        if shape in moments and max(len(found), len(moments[shape])) <= MOST
    ]


def sample(pairs: Sequence[DeltaPair], task: Task, target: Fill, base: Fill) -> Sampled:
    """Read a sample of a task's tensors and return where they lead.

    What cannot be read tells nothing: it is read again, and said, where it is packed.
    """
    try:
        if task.weight is not None:
            now, before = _both(pairs[task.weight], target, base)
            return Sampled(task, (_unit(before - now),))
        if Kind.OTHER in task.moments:
            sides = _both(pairs[task.moments[Kind.OTHER]], target, base)
            return Sampled(task, tuple(map(_unit, sides)))
        first, second = (_both(pairs[task.moments[kind]], target, base) for kind in _MOMENTS)
        return Sampled(task, tuple(_unit(_step(m, v)) for m, v in zip(first, second, strict=True)))
    except FtckptError:
        return Sampled(task, (None,))


def match(weights: Iterable[Sampled], moments: Iterable[Sampled]) -> Iterator[tuple[Task, Task]]:
    """Yield the weights and the moments of one shape that belong together beyond doubt."""
    import numpy as np

    found = [one for one in weights if one.directions[0] is not None]
    tried = [one for one in moments if any(d is not None for d in one.directions)]
    if not found or not tried:
        return
    change = np.stack([one.directions[0] for one in found if one.directions[0] is not None])
    scores = np.full((len(found), len(tried)), -1.0, dtype="f4")
    for side in range(2):
        nothing = np.zeros_like(change[0])
        steps = [one.directions[side] if side < len(one.directions) else None for one in tried]
        along = np.stack([nothing if step is None else step for step in steps])
        np.maximum(scores, change @ along.T, out=scores)
    least = max(_LEAST, _CHANCE / change.shape[1] ** 0.5)
    for row, column in enumerate(scores.argmax(axis=1)):
        score = scores[row, column]
        others = (np.delete(scores[row], column), np.delete(scores[:, column], row))
        if score >= least and all(_AHEAD * o.max(initial=0) <= score for o in others):
            yield found[row].task, tried[column].task


def matched(
    pairs: Sequence[DeltaPair],
    sampled: Callable[[Sequence[Task]], Iterable[Sampled]],
) -> list[DeltaPair]:
    """Return the pairs, each weight that was matched with its moments as helpers and kin.

    Args:
        pairs: all tensors.
        sampled: makes the samples of some tasks, in any order (`sample`).
    """
    made = list(pairs)
    for weights, moments in candidates(pairs):
        samples = list(sampled([*weights, *moments]))
        both = ([s for s in samples if (s.task.weight is None) is is_moment]
                for is_moment in (False, True))  # fmt: skip
        for weight, owner in match(*both):
            assert weight.weight is not None
            place = next(iter(owner.moments.values()))
            pair = made[weight.weight]
            made[weight.weight] = pair._replace(helpers=owner.moments, kin=pairs[place].kin)
    return made


def _both(pair: DeltaPair, target: Fill, base: Fill) -> tuple[Array, Array]:
    assert pair.base is not None
    return _read(pair, target, pair.info.key), _read(pair, base, pair.base)


def _read(pair: DeltaPair, fill: Fill, key: str) -> Array:
    """Return some elements, from runs that are spread over a tensor, as float64."""
    import numpy as np

    count = word_count(pair.info.dtype, pair.info.numel)
    runs = _RUNS if count > _RUNS * _RUN else 1
    length = min(count, _RUN * _RUNS) // runs
    data = memoryview(bytearray(4 * runs * length))
    for run in range(runs):
        start = run * (count - length) // max(1, runs - 1)
        fill(key, 4 * start, data[4 * run * length : 4 * (run + 1) * length])
    return np.frombuffer(data, "<f4").astype("f8")


def _step(moment: Array, square: Array) -> Array:
    import numpy as np

    with np.errstate(all="ignore"):  # NaN and infinity are data here
        result: Array = moment / (np.sqrt(square) + _EPS)
    return result


def _unit(values: Array) -> Array | None:
    """Return values with mean 0 and length 1; None where they say nothing."""
    import numpy as np

    with np.errstate(all="ignore"):
        values = values - values.mean()
        length = np.sqrt(values @ values)
        if not np.isfinite(length) or not length > 0:
            return None
        result: Array = (values / length).astype("f4")
    return result
