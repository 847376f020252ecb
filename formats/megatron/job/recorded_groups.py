"""Carry the optimizer records of groups of data-parallel ranks through another format.

torch_dist in buckets (`dp_reshardable`) and in flat shards keeps the settings of an optimizer once
a group of ranks, beside the state. That state is read as tensors of parameters, so that of what the
groups recorded only what all share is left to keep; sizes of buckets say nothing any more.

    optimizer.distributed.dp_group_idx_1.optimizer/shard_0_1     as an object, or taken apart
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ftckpt.formats.megatron.torch_dist.reshard import (
    GATHERED,
    OF_BUCKETS,
    OfGroup,
    differing,
    of_group,
)
from ftckpt.formats.pickles.walk import Path
from ftckpt.formats.state.nested import NestedState
from ftckpt.formats.torch_files.write_tree import pickled

from .optimizer_tree import RESHARDABLE, SHARDING, numbered


class GroupState:
    """The settings of optimizers, as their groups of ranks recorded them."""

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
            states = {name: tree.settled(lambda path: True) for name, tree in trees.items()}
            if states:
                found[number][leaf] = _one(leaf, states)
        if not found:
            return optimizer
        known = numbered(optimizer)
        made = {
            number: {**known.get(number, {}), **leaves, SHARDING: RESHARDABLE}
            for number, leaves in found.items()
        }
        return made.get(None, {**known, **made})


def _one(leaf: str, states: Mapping[str, Any]) -> Any:
    first, *others = states
    wanted = pickled(states[first])[0]
    for name in others:
        if pickled(states[name])[0] != wanted:
            raise differing(leaf, name, first)
    return states[first]
