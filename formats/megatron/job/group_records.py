"""What groups of data-parallel ranks recorded of their optimizer, in a store or carried along.

torch_dist in buckets (`dp_reshardable`) and in flat shards keeps the settings of an optimizer once
a group of ranks, beside the state. That state is read as tensors of parameters, so that of what the
groups recorded only what all share is left to keep; sizes of buckets say nothing any more.

    optimizer.distributed.dp_group_idx_1.optimizer/shard_0_1     as an object, or taken apart
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from ftckpt.errors import UnsupportedError
from ftckpt.formats.pickles.walk import Path
from ftckpt.formats.state.nested import NestedState
from ftckpt.formats.torch_files.write_tree import pickled

from .optimizer_tree import RESHARDABLE, SHARDING, numbered

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
