"""Place local shards of FSDP2 by the DTensors of their optimizer.

RLinf's `checkpoint_rank_R.pt` holds each parameter's local tensor, and the optimizer's state_dict
as it is: numbered, with DTensors. A moment has its parameter's mesh and placements, which are the
shard's too if the number means exactly one parameter.

Source: rlinf/hybrid_engines/fsdp/strategy/checkpoint.py (`checkpoint_format="local_shard"`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ftckpt.formats.torch_files.sharded import Distributed, Held
from ftckpt.formats.torch_files.values import TensorRef

from .rank_optimizer import is_optimizer, parameter_names, state_entries

VERSION = "fsdp_version"
OPTIMIZERS = "optimizers"


def is_local(tree: Any) -> bool:
    """Say whether a rank's file has local shards of FSDP beside its optimizers."""
    return isinstance(tree, dict) and VERSION in tree and isinstance(tree.get(OPTIMIZERS), list)


def placed(
    optimizers: Sequence[Any],
    weights: Sequence[tuple[str, Held]],
    read: Callable[[Any], Held | None],
) -> Mapping[str, Distributed]:
    """Return name -> the weight as a part of its DTensor, for those whose place is proven.

    Args:
        optimizers: the state_dicts of all optimizers.
        weights: the local tensors, in the order of the model's state_dict.
        read: `HeldReader.read` of the file.
    """
    if len(optimizers) != 1 or not is_optimizer(optimizers[0]):
        return {}

    def local(value: Any) -> Held | None:
        held = read(value)
        return held.local if isinstance(held, Distributed) else held

    entries = state_entries(optimizers[0])
    names = parameter_names(entries, optimizers[0]["param_groups"], weights, local)
    by_name = dict(weights)
    found: dict[str, Distributed] = {}
    for key, state in entries.items():
        weight = by_name.get(names[key])
        moments = [m for m in map(read, state.values()) if isinstance(m, Distributed)]
        if type(weight) is not TensorRef or not moments:
            continue
        first = moments[0]
        places = {(m.shape, m.placements, m.mesh, m.local.shape) for m in moments}
        if len(places) == 1 and first.local.shape == weight.shape:
            found[names[key]] = first._replace(local=weight, dtype=weight.dtype, record=None)
    return found
