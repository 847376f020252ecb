"""Megatron's optimizer state in one rank's files: which tensor belongs to which parameter.

Neither form of it names a parameter; both follow from the order of the model's own tensors.

- Without the distributed optimizer `model_optim_rng.pt` holds torch's form, with integers for
  parameters, and fp32 masters in lists. Integers count the parameters group by group; a group holds
  those with or without weight decay (no decay: vectors and biases), experts apart. Where Muon is
  chained with another optimizer, matrices but for embeddings and the output layer are Muon's.
- With it `distrib_optim.pt` holds flat buffers (`buffers`).

A mapping is accepted only where every shape, or the size of every buffer and the place of every
weight in memory, agrees with it: a moment under the wrong name would be worse than one without.

Source: `_get_param_groups`, `Float16OptimizerWithFloat16Params`, `FP32Optimizer` and
`ChainedOptimizer` in megatron/core/optimizer; `get_parameter_state_dp_zero` in
distrib_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ftckpt.formats.megatron.job.optimizer_tree import MASTERS, chained, is_muon, torchs
from ftckpt.formats.megatron.rank_files.grid import Arguments
from ftckpt.formats.megatron.rank_files.tensor_names import LocalTensor
from ftckpt.formats.pickles.walk import step_of
from ftckpt.formats.state.param_ids import names_of_ids
from ftckpt.formats.torch_files.values import Composite, SubclassRef, TensorRef

HALF = ("bfloat16", "float16")
# Parameters that Megatron marks as embedding or output layer.
_ENDS = ("word_embeddings.weight", "output_layer.weight")


class OptimizerTensor(NamedTuple):
    """One tensor of an optimizer's state."""

    of: LocalTensor  # the parameter that it belongs to
    leaf: str  # `param` (the fp32 master), `exp_avg`, `step`, …
    held: TensorRef  # where its elements are: of the parameter's shape, or a single number
    stored: str  # how the file spells it

    @property
    def number(self) -> bool:
        """Whether it is a number that is the same wherever the parameter is, such as a step."""
        return self.leaf == "step" or self.held.shape != self.of.ref.shape


class UndistributedOptimizer(NamedTuple):
    """One optimizer that is not distributed."""

    number: int  # its place among chained ones
    label: str  # how the file spells it
    inside: str  # how the file spells torch's form in it
    state: Mapping[Any, Any]  # of each parameter, by its number
    # for each group, the numbers of its parameters and the parameters
    members: Sequence[tuple[Sequence[int], Sequence[LocalTensor]]]
    masters: Any  # the fp32 copies, group by group; None where it keeps none


class Unmapped(Exception):
    """Why an optimizer's state cannot be given to parameters, in words."""


def plain_states(
    tree: Any, held: Sequence[LocalTensor], *, experts_apart: bool, args: Arguments
) -> Iterator[OptimizerTensor]:
    """Yield the state of an optimizer that is not distributed.

    Args:
        tree: what `model_optim_rng.pt` holds as `optimizer`: one optimizer, or a list of them.
        held: the parameters of the file, in order.
        experts_apart: whether experts have an optimizer of their own.
        args: of the job.

    Raises:
        Unmapped: the order of the parameters does not follow from the groups and the shapes.
    """
    for one in plain_optimizers(tree, held, experts_apart=experts_apart, args=args):
        for ids, chosen in one.members:
            for key, local in zip(ids, chosen, strict=True):
                yield from _of_one(one.state.get(key, {}), local, f"{one.inside}.state.{key}")
        if one.masters is not None:
            mine = [chosen for _, chosen in one.members]
            yield from _masters(one.masters, mine, f"{one.label}.{MASTERS}")


def plain_optimizers(
    tree: Any, held: Sequence[LocalTensor], *, experts_apart: bool, args: Arguments
) -> Iterator[UndistributedOptimizer]:
    """Yield the optimizers that keep their state here, each with the parameters of its groups.

    Args and errors are those of `plain_states`.
    """
    found = list(chained(tree))
    muons = [is_muon(one) for _, one in found]
    for number, (label, one) in enumerate(found):
        inner = torchs(one)
        inside = f"{label}.optimizer" if inner is not one else label
        masters = one.get(MASTERS)
        if "state" not in inner and masters is None:
            continue  # the distributed optimizer keeps it in a file of its own
        state: Any = inner.get("state")
        groups: Any = inner.get("param_groups")
        if not _is_torchs(state, groups):
            raise Unmapped(f"{inside} does not have torch's form")
        mine = held
        if any(muons) and not all(muons):
            mine = [local for local in held if is_of_muon(local) == muons[number]]
        members = _members(groups, state, mine, experts_apart=experts_apart, args=args)
        yield UndistributedOptimizer(number, label, inside, state, members, masters)


def is_of_muon(local: LocalTensor) -> bool:
    """Return whether Muon takes a parameter: a matrix, no embedding and no output layer.

    Source: `get_megatron_muon_optimizer` in megatron/core/optimizer/muon.py (core 0.16).
    """
    return len(local.ref.shape) == 2 and not local.name.endswith(_ENDS)


def _is_torchs(state: Any, groups: Any) -> bool:
    """Return whether each state is a dict and belongs to a parameter of a group."""
    if not isinstance(state, dict) or not isinstance(groups, list):
        return False
    if not all(isinstance(group, dict) for group in groups):
        return False
    known = {key for group in groups for key in _ids(group)}
    return all(type(k) is int and k in known and isinstance(v, dict) for k, v in state.items())


def _of_one(state: Mapping[Any, Any], local: LocalTensor, label: str) -> Iterator[OptimizerTensor]:
    """Yield the tensors of one parameter's state: like the parameter, or a single number."""
    for key, value in state.items():
        leaf = str(step_of(key))
        if isinstance(value, (SubclassRef, Composite)):
            raise Unmapped(f"{label}.{leaf} is not a plain tensor")
        if isinstance(value, TensorRef):
            if value.shape != local.ref.shape and not _single(value):
                raise Unmapped(f"{label}.{leaf} does not have the shape of its parameter")
            yield OptimizerTensor(local, leaf, value, f"{label}.{leaf}")


def _members(
    groups: Sequence[Mapping[Any, Any]],
    state: Mapping[Any, Any],
    held: Sequence[LocalTensor],
    *,
    experts_apart: bool,
    args: Arguments,
) -> list[tuple[list[int], list[LocalTensor]]]:
    """Return the ids of each group and the parameters that they mean."""
    ids = [_ids(group) for group in groups]
    apart = experts_apart and any("is_expert_parallel" in group for group in groups)
    found = [
        (own, [p for p in held if class_of(p, args, apart=apart) == class_of_group(g, args, apart)])
        for own, g in zip(ids, groups, strict=True)
    ]
    if all(len(own) == len(chosen) for own, chosen in found) and all(
        _fits(state.get(key), local)
        for own, chosen in found
        for key, local in zip(own, chosen, strict=True)
    ):
        return found
    # Groups of another rule: shapes alone can still leave only one way.
    shapes: dict[Hashable, tuple[int, ...]] = {
        key: shape for own in ids for key in own if (shape := _shape(state.get(key)))
    }
    if apart:
        experts = any(group.get("is_expert_parallel") is True for group in groups)
        held = [local for local in held if local.expert == experts]
    numbered = {str(place): local for place, local in enumerate(held)}
    weights = [(place, local.ref.shape) for place, local in numbered.items()]
    proven = names_of_ids(ids, shapes, weights)
    if proven is None:
        raise Unmapped("the shapes of its state do not fit the order of the model's parameters")
    return [(own, [numbered[proven[key]] for key in own]) for own in ids]


def _ids(group: Mapping[Any, Any]) -> list[int]:
    ids = group.get("params")
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise Unmapped("a parameter group does not list its parameters")
    return ids


def class_of(local: LocalTensor, args: Arguments, *, apart: bool) -> tuple[bool, bool, bool]:
    """Return what decides a parameter's group: no decay, expert, rate of its own."""
    name = local.name
    plain = len(local.ref.shape) == 1 or name.endswith(".bias")
    if args.flag("apply_wd_to_qk_layernorm"):
        plain = plain and "q_layernorm." not in name and "k_layernorm." not in name
    ends = name.endswith(_ENDS)
    return plain, apart and local.expert, ends and args.get("decoupled_lr") is not None


def class_of_group(
    group: Mapping[Any, Any], args: Arguments, apart: bool
) -> tuple[bool, bool, bool]:
    """Return what class of parameters a group holds: see `class_of`."""
    decay = group.get("wd_mult", group.get("weight_decay"))
    rate = args.get("decoupled_lr")
    own_rate = group.get("is_decoupled_lr") is True or group.get("max_lr") == rate
    expert = apart and group.get("is_expert_parallel") is True
    return decay == 0.0, expert, rate is not None and own_rate


def _fits(state: Any, local: LocalTensor) -> bool:
    shape = _shape(state)
    return shape is None or shape == local.ref.shape


def _shape(state: Any) -> tuple[int, ...] | None:
    """Return the shape of a parameter's state: that of its moments, which all must have."""
    values = state.values() if isinstance(state, dict) else ()
    shapes = {v.shape for v in values if isinstance(v, TensorRef) and v.shape}
    return max(shapes, key=len) if shapes else None


def _masters(
    tree: Any, groups: Sequence[Sequence[LocalTensor]], label: str
) -> Iterator[OptimizerTensor]:
    """Yield the fp32 copies of the 16-bit parameters, which stand in the order of each group."""
    half = [[p for p in group if p.ref.dtype.name in HALF] for group in groups]
    if not isinstance(tree, list) or len(tree) != len(half):
        raise Unmapped("its fp32 masters do not have the groups of its state")
    for number, (own, copies) in enumerate(zip(half, tree, strict=True)):
        values = copies if isinstance(copies, list) else []
        shapes = [v.shape if isinstance(v, TensorRef) else None for v in values]
        if shapes != [p.ref.shape for p in own]:
            raise Unmapped(f"its fp32 masters of group {number} do not have the parameters' shapes")
        for place, (local, value) in enumerate(zip(own, values, strict=True)):
            yield OptimizerTensor(local, "param", value, f"{label}.{number}.{place}")


def _single(ref: TensorRef) -> bool:
    return prod(ref.shape) == 1 and len(ref.shape) <= 1
