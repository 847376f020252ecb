"""The optimizers of a legacy Megatron source: their groups, and which parameter is in which.

All ranks have the same groups; what is in them depends on the layout. Experts have an optimizer of
their own where they have data-parallel ranks of their own, and share the dense one elsewhere: then
groups are split, or joined where all else about them is equal.

What groups of data-parallel ranks recorded of their optimizer, in a store or carried along.

torch_dist in buckets (`dp_reshardable`) and in flat shards keeps the settings of an optimizer once
a group of ranks, beside the state. That state is read as tensors of parameters, so that of what the
groups recorded only what all share is left to keep; sizes of buckets say nothing any more.

    optimizer.distributed.dp_group_idx_1.optimizer/shard_0_1     as an object, or taken apart
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeGuard

from ftckpt.checkpoint.dtypes import DType
from ftckpt.errors import UnsupportedError
from ftckpt.formats.megatron.optimizer.per_rank import (
    Unmapped,
    class_of,
    class_of_group,
    plain_optimizers,
)
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.megatron.rank_files.source import FirstRanks
from ftckpt.formats.megatron.rank_files.tensor_names import LocalTensor, is_expert
from ftckpt.formats.pickles.walk import Path
from ftckpt.formats.state.paths import NestedState
from ftckpt.formats.torch_files.values import StoredStorage
from ftckpt.formats.torch_files.write_tree import pickled

from .optimizer_tree import INNER, RESHARDABLE, SHARDING, chained, groups_in, numbered

_EXPERT = "is_expert_parallel"
_PLAIN = (int, float, str, bool, type(None), tuple)


@dataclass
class Optimizers:
    """All optimizers of a layout."""

    # what a file holds of each, but for its groups and the state of parameters
    trees: Sequence[Mapping[Any, Any]]
    groups: list[list[Mapping[Any, Any]]]  # of each, without their parameters
    # by weight: the number of its optimizer, and of its group there
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    # by weight: what the state of a parameter holds by leaf; tensors are found elsewhere
    states: dict[str, Mapping[Any, Any]] = field(default_factory=dict)
    # of the tensors inside `trees` and `groups`
    storages: Mapping[str, StoredStorage] = field(default_factory=dict)
    wrapped: str = ""  # how several are kept: `list`, `dict`, or "" for one alone
    dense: int = 1  # how many of them are not the experts' own
    plain: bool = False  # whether they keep their state beside the weights, and not in flat buffers


class BufferForm(NamedTuple):
    """How files keep a flat buffer of the distributed optimizer."""

    listed: bool  # whether one optimizer alone stands in a list
    gradients: Mapping[DType, DType]  # type of the gradients, by type of the parameters
    leaves: Mapping[Any, Any]  # what a buffer holds, in order: tensors and other things
    storages: Mapping[str, StoredStorage]  # of what else stands there


class JobOptimizer(NamedTuple):
    """What is written of the optimizers of a job."""

    optimizers: Optimizers  # their groups and parameters
    form: BufferForm | None  # of the flat buffers; None where there are none
    certain: bool = False  # whether to refuse buckets that versions of Megatron lay out differently
    # by stage, chunk and name: where an example's parameters begin in their buffers
    starts: Mapping[tuple[int, int, str], int] | None = None


def form_of(ranks: FirstRanks) -> BufferForm | None:
    """Return the form of the source's buffers; None where it has none that could be read."""
    gradients: dict[DType, DType] = {}
    form: BufferForm | None = None
    for at in ranks.coordinates():
        stream = ranks.distributed(at)
        if stream is None:
            continue
        trees = stream.tree if isinstance(stream.tree, list) else [stream.tree]
        for buffer in (b for t in trees if isinstance(t, dict) for b in t.values()):
            for types, leaves in buffer.items() if isinstance(buffer, dict) else ():
                if not _are_dtypes(types) or not isinstance(leaves, dict):
                    continue
                gradients.setdefault(*types)
                if form is None:
                    listed = isinstance(stream.tree, list) and len(trees) == 1
                    form = BufferForm(listed, gradients, leaves, stream.storages)
    return form


def _are_dtypes(types: Any) -> TypeGuard[tuple[DType, DType]]:
    """Return whether the key of a buffer is what it must be: the types of weights and gradients."""
    return isinstance(types, tuple) and len(types) == 2 and all(isinstance(t, DType) for t in types)


def optimizers_of(ranks: FirstRanks) -> Optimizers | None:
    """Return the optimizers of the source; None where it keeps none.

    Raises:
        UnsupportedError: parameters could not be told from their numbers, or ranks have other
            groups than the first one.
    """
    first = ranks.stream(ranks.coordinates()[0])
    tree = first.tree.get(INNER)
    if not isinstance(tree, (dict, list)) or not tree:
        return None
    trees = [dict(one) for _, one in chained(tree)]
    single = isinstance(tree, dict) and not all(type(key) is int for key in tree)
    if not single and len(trees) != len(tree):
        raise _unknown("one of the chained optimizers has no state")
    found = Optimizers(
        trees=trees,
        groups=[groups_in(one) for one in trees],
        storages=first.storages,
        wrapped="" if single else type(tree).__name__,
    )
    apart = ranks.layout.grid.experts_apart and len(trees) > 1
    found.dense = len(trees) - apart
    for at in ranks.coordinates():
        own = ranks.stream(at).tree.get(INNER)
        alike = [[_alike(g) for g in groups_in(one)] for _, one in chained(own)]
        if alike != [[_alike(g) for g in groups] for groups in found.groups]:
            raise _unknown(f"{ranks.stream(at).file} has other groups than {first.file}")
        _place(found, ranks, at, own)
    return found


def _place(found: Optimizers, ranks: FirstRanks, at: Any, tree: Any) -> None:
    """Note the optimizer, the group and the state of each parameter of a rank."""
    apart, args = ranks.layout.grid.experts_apart, ranks.layout.args
    named = ranks.parameters(at)
    weights = {(n.local.chunk, n.local.name): n.weight for n in named}
    held = [n.local for n in named]
    try:
        plain = list(plain_optimizers(tree, held, experts_apart=apart, args=args))
    except Unmapped as reason:
        raise _unknown(str(reason)) from reason
    for one in plain:
        for group, (ids, members) in enumerate(one.members):
            for number, local in zip(ids, members, strict=True):
                weight = weights[local.chunk, local.name]
                found.places.setdefault(weight, (one.number, group))
                if number in one.state:
                    found.states.setdefault(weight, one.state[number])
    if plain:
        found.plain = True
        return
    for local in held:
        # The distributed optimizer's groups list no parameters: the rule of the groups decides.
        own = found.dense if len(found.trees) > found.dense and local.expert else 0
        group = next(iter(groups_like(local, found.groups[own], args, apart=apart)), 0)
        found.places.setdefault(weights[local.chunk, local.name], (own, group))


def groups_like(
    local: LocalTensor, groups: Iterable[Mapping[Any, Any]], args: Arguments, *, apart: bool
) -> list[int]:
    """Return the numbers of the groups that hold parameters of the class of one."""
    wanted = class_of(local, args, apart=apart)
    return [n for n, group in enumerate(groups) if class_of_group(group, args, apart) == wanted]


def regrouped(found: Optimizers, *, apart: bool) -> Optimizers:
    """Return the optimizers of a layout in which experts have one of their own, or have none.

    Args:
        found: of the source.
        apart: whether they have.

    Raises:
        UnsupportedError: the source chains optimizers in another way.
    """
    chained = len(found.trees) > found.dense
    if apart == chained or not any(is_expert(weight) for weight in found.places):
        return found
    if found.dense != 1:
        raise _unknown("dense parameters have several optimizers, and experts come to them or go")
    return _split(found) if apart else _joined(found)


def _split(found: Optimizers) -> Optimizers:
    places: dict[str, tuple[int, int]] = {}
    sides: list[list[int]] = [[], []]
    for weight, (_, group) in found.places.items():
        side = sides[is_expert(weight)]
        if group not in side:
            side.append(group)
    # A group of nobody's parameters stays where it is.
    sides[0] += [g for g in range(len(found.groups[0])) if g not in sides[0] + sides[1]]
    for side in sides:
        side.sort()
    for weight, (_, group) in found.places.items():
        number = int(is_expert(weight))
        places[weight] = (number, sides[number].index(group))
    groups = [[found.groups[0][g] for g in side] for side in sides]
    groups[1] = [_of_experts(group, True) for group in groups[1]]
    wrapped = found.wrapped or "list"
    return replace(found, trees=[found.trees[0]] * 2, groups=groups, places=places, wrapped=wrapped)


def _joined(found: Optimizers) -> Optimizers:
    dense, own = list(found.groups[0]), found.groups[1]
    moved: dict[int, int] = {}
    for number, group in enumerate(own):
        group = _of_experts(group, False)
        known = [_alike(one) for one in dense]
        if _alike(group) not in known:
            dense.append(group)
            known.append(_alike(group))
        moved[number] = known.index(_alike(group))
    places = {
        weight: (0, moved[group] if optimizer else group)
        for weight, (optimizer, group) in found.places.items()
    }
    return replace(found, trees=found.trees[:1], groups=[dense], places=places, wrapped="")


def _of_experts(group: Mapping[Any, Any], apart: bool) -> Mapping[Any, Any]:
    return {**group, _EXPERT: apart} if _EXPERT in group else group


def _alike(group: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Return what of a group is the same on all ranks, as far as it is plain."""
    said: Sequence[tuple[Any, Any]] = list(group.items())
    return sorted((str(k), v) for k, v in said if k != "params" and type(v) in _PLAIN)


def _unknown(why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the optimizer's state cannot be laid out anew: {why}",
        hint="--only model writes the weights alone",
    )


_OF_GROUP = re.compile(
    r"(?:chained_(?P<number>\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_\d{1,7}\."
    r"(?P<leaf>\w+)/shard_0(?:_1)?"
)
# Sizes of buckets: other ranks have other buckets, and `fully_reshardable` has none.
OF_BUCKETS = ("per_bucket_numel", "per_bucket_numel_unpadded")
# The state of all parameters in one object, which nothing here takes apart.
GATHERED = "param_state"


class OfGroup(NamedTuple):
    """What a name says of state that a group of ranks recorded of its optimizer."""

    number: int | None  # of the optimizer; None for one alone
    leaf: str  # which state


def of_group(name: str) -> OfGroup | None:
    """Return which group's state the name of an object means; None for other names."""
    match = _OF_GROUP.fullmatch(name)
    if match is None:
        return None
    return OfGroup(None if match["number"] is None else int(match["number"]), match["leaf"])


def agreed(leaf: str, states: Iterable[tuple[str, Any]]) -> Any:
    """Return what all groups of ranks recorded of an optimizer.

    Args:
        leaf: which state.
        states: the name of each and what it holds; there is one.

    Raises:
        UnsupportedError: two differ.
    """
    (first, found), *others = states
    pickle = pickled(found)[0]
    for name, other in others:
        if pickled(other)[0] != pickle:
            raise UnsupportedError(
                f"{name} differs from {first}: ranks have different {leaf} states, and a checkpoint"
                " that any number of ranks can load has one",
                tensor=name,
                hint="--only model writes the weights alone",
            )
    return found


class GroupState:
    """The settings of optimizers, as another format carries the records of their groups."""

    def __init__(self) -> None:
        self._trees: dict[OfGroup, dict[str, NestedState]] = defaultdict(dict)

    def takes(self, path: Path) -> bool:
        """Return whether an object at a path is a group's; the state of all parameters is not."""
        of = of_group(str(path[0]))
        return of is not None and of.leaf != GATHERED

    def put(self, path: Path, value: Any) -> None:
        """Put a part of such an object at its path in it."""
        of = of_group(str(path[0]))
        assert of is not None
        trees = self._trees[of]
        rest = path[2:] if path[1:2] == (0,) else path[1:]  # in a list of one
        if of.leaf not in OF_BUCKETS and rest:
            trees.setdefault(str(path[0]), NestedState()).put(rest, value)

    def shared(self, optimizer: Any) -> Any:
        """Return the optimizers of a common state with what all groups of each recorded.

        Args:
            optimizer: of the common state.

        Raises:
            UnsupportedError: groups recorded different settings.
        """
        found: dict[Any, dict[Any, Any]] = defaultdict(dict)
        for (number, leaf), trees in self._trees.items():
            if trees:
                states = ((name, tree.settled(lambda path: True)) for name, tree in trees.items())
                found[number][leaf] = agreed(leaf, states)
        if not found:
            return optimizer
        known = numbered(optimizer)
        made = {
            number: {**known.get(number, {}), **leaves, SHARDING: RESHARDABLE}
            for number, leaves in found.items()
        }
        return made.get(None, {**known, **made})
