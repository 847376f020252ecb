"""What the tree of a Megatron job's optimizers says, as files of ranks and common states have it.

    {"state": …, "param_groups": […]}                        torch's form
    {"optimizer": …, "fp32_from_fp16_params": […], …}        around it: masters, or a loss scale
    [one, another], {0: one, 1: another}                     several that are chained

Source: `DistributedOptimizer.sharded_state_dict`, `ChainedOptimizer.sharded_state_dict` and
`Float16OptimizerWithFloat16Params.state_dict` in megatron/core/optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

INNER = "optimizer"
GROUPS = "param_groups"
MASTERS = "fp32_from_fp16_params"
# The same in old versions.
ALL_MASTERS = (MASTERS, "fp32_from_fp16")
# How torch_dist says in which form it keeps a distributed optimizer, and the one for any ranks.
SHARDING = "param_state_sharding_type"
RESHARDABLE = "fully_reshardable"
# How groups of Muon spell its setting: emerging-optimizers 0.1, and 0.3.
_MOMENTUM = frozenset({"momentum_beta", "momentum"})
# What groups of other optimizers have, of which some have a momentum too (SGD, RMSprop).
_OF_OTHERS = frozenset({"betas", "eps", "dampening", "nesterov", "alpha", "centered"})


def torchs(tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the part of an optimizer's tree that has torch's form."""
    inner = tree.get(INNER)
    return inner if isinstance(inner, dict) else tree


def groups_in(tree: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    """Return the groups of an optimizer; none where they are not of torch's form."""
    groups = torchs(tree).get(GROUPS)
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return []
    return groups


def is_muon(one: Mapping[Any, Any]) -> bool:
    """Return whether an optimizer's tree is Muon's: a momentum, and no setting of another's."""
    groups = groups_in(one)
    return bool(groups) and all(
        not _MOMENTUM.isdisjoint(group) and _OF_OTHERS.isdisjoint(group) for group in groups
    )


def chained(tree: Any) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield the optimizers in a rank's file, each with how the file spells it.

    Old versions keep several in a dict by number.
    """
    if isinstance(tree, dict) and tree and all(type(key) is int for key in tree):
        tree = [tree[key] for key in sorted(tree)]
    if isinstance(tree, dict):
        yield INNER, tree
    elif isinstance(tree, list):
        yield from ((f"{INNER}.{i}", one) for i, one in enumerate(tree) if isinstance(one, dict))


def numbered(tree: Any) -> dict[Any, Mapping[Any, Any]]:
    """Return the optimizers of a common state by number; one alone has the number None."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree)) if len(tree) > 1 else (*tree, None)[0]
    if not isinstance(tree, dict):
        return {}
    if tree and all(type(key) is int for key in tree):
        return {key: one for key, one in tree.items() if isinstance(one, dict)}
    return {None: tree}


def master_word(optimizers: Collection[Mapping[Any, Any]]) -> str:
    """Return how the optimizers of a common state call an fp32 copy of a weight."""
    plain = optimizers and not any(SHARDING in one for one in optimizers)
    return "fp32_param" if plain else "param"
