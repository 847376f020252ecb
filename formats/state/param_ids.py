"""Prove which parameter an optimizer's integer id means.

`torch.optim.Optimizer.state_dict` numbers parameters in the order of its groups and forgets their
names (torch 2.6 added `param_names`, where the caller gave names). A state_dict of the model lists
the same parameters in module order, with buffers among them. The mapping is accepted only when it
is the one possible: a moment under the wrong name would be worse than a moment without a name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.optimizer_states import StateShape, named_state

if TYPE_CHECKING:
    from ftckpt.checkpoint import TensorInfo
    from ftckpt.transfer.content import TargetTensor

Shape = tuple[int, ...]


def names_of_ids(
    groups: Sequence[Sequence[Hashable]],
    shapes: Mapping[Hashable, Shape],
    weights: Sequence[tuple[str, Shape]],
) -> dict[Hashable, str] | None:
    """Return id -> name, or None where it cannot be proven.

    Each group keeps the model's order, because `parameters()` gives that order and splits by rule
    keep it. So a mapping is a set of order-preserving matches with equal shapes; it is proven when
    there is exactly one.

    Args:
        groups: the ids of each param group.
        shapes: id -> shape of its state; ids without state are absent and match any shape.
        weights: (name, shape) of the model's tensors, in the order of its state_dict.
    """
    ids = [i for group in groups for i in group]
    if not ids or len(set(ids)) != len(ids):
        return None
    if len(groups) == 1:
        return _one_group(ids, shapes, weights)
    if len(ids) != len(weights):
        return None
    return _by_shape(groups, shapes, weights)


def _one_group(
    ids: Sequence[Hashable], shapes: Mapping[Hashable, Shape], weights: Sequence[tuple[str, Shape]]
) -> dict[Hashable, str] | None:
    """Match one group: leftmost and rightmost embedding are equal exactly when there is one."""
    first = _embed(ids, shapes, weights)
    if first is None:
        return None
    back = _embed(ids[::-1], shapes, weights[::-1])
    assert back is not None
    last = [len(weights) - 1 - place for place in reversed(back)]
    if first != last:
        return None
    return {i: weights[place][0] for i, place in zip(ids, first, strict=True)}


def _embed(
    ids: Sequence[Hashable], shapes: Mapping[Hashable, Shape], weights: Sequence[tuple[str, Shape]]
) -> list[int] | None:
    places: list[int] = []
    place = 0
    for i in ids:
        while place < len(weights) and shapes.get(i, weights[place][1]) != weights[place][1]:
            place += 1
        if place == len(weights):
            return None
        places.append(place)
        place += 1
    return places


def _by_shape(
    groups: Sequence[Sequence[Hashable]],
    shapes: Mapping[Hashable, Shape],
    weights: Sequence[tuple[str, Shape]],
) -> dict[Hashable, str] | None:
    """Match groups of a partition: provable where no shape stands in two groups."""
    owner: dict[Shape, int] = {}
    for number, group in enumerate(groups):
        for i in group:
            shape = shapes.get(i)
            if shape is None or owner.setdefault(shape, number) != number:
                return None
    found: dict[Hashable, str] = {}
    for number, group in enumerate(groups):
        mine = [(name, shape) for name, shape in weights if owner.get(shape) == number]
        if [shape for _, shape in mine] != [shapes[i] for i in group]:
            return None
        found.update((i, name) for i, (name, _) in zip(group, mine, strict=True))
    return found


def states_fit(
    tensors: Mapping[str, TensorInfo] | Mapping[str, TargetTensor], keys: Iterable[str]
) -> bool:
    """Whether every one of these states has a weight of its name, and of its shape.

    A content without weights shows neither: then what is recorded of the names counts.
    """
    weights = {one.name: one.shape for one in tensors.values() if one.component == "model"}
    for key in keys if weights else ():
        one = tensors[key]
        told = one.kind is not Kind.OTHER
        named = None if told else named_state(one.name, weights)
        shape = weights.get(named.parameter if named else one.name)
        same = told or (named and named.state and named.state.shape is StateShape.SAME)
        if shape is None or (same and shape != one.shape):
            return False
    return True
