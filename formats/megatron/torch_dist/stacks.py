"""Put logical tensors together as Megatron's torch_dist stores them: layers and experts stacked.

    decoder.layers.0.mlp.linear_fc1.weight   ┐
    decoder.layers.1.mlp.linear_fc1.weight   ┴ decoder.layers.mlp.linear_fc1.weight [2, rows, …]
    master:decoder.layers.0.mlp…               optimizer.state.param.decoder.layers.mlp…

A stack has one chunk for each layer, expert and part of a tensor rank. What does not fill a stack
(a layer that has no such tensor, or one of another shape) is stored with numbers in its names.

Source: `sharded_state_dict` in megatron/core/transformer/{transformer_block,mlp,moe/experts}.py
and megatron/core/optimizer/distrib_optimizer.py (`sharded_param_state_fully_reshardable`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

from ftckpt.checkpoint import Box, Kind
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.optimizer_states import STATES, named_state
from ftckpt.transfer.content import TargetTensor

from .names import StoredForm, halves_of, stored_place

_STATE = "optimizer.state."
_MOMENTS = {Kind.EXP_AVG: "exp_avg", Kind.EXP_AVG_SQ: "exp_avg_sq"}


class StackedTensor(NamedTuple):
    """One logical tensor of a stored one."""

    key: str  # its key
    place: tuple[int, ...]  # on the leading axes
    box: Box  # the part of it that is stored here


class StoredTensor(NamedTuple):
    """A tensor as the store has it."""

    name: str  # in the store
    dtype: DType  # of its elements
    shape: tuple[int, ...]  # with leading axes
    members: tuple[StackedTensor, ...]  # the logical tensors that fill it


class _Form(NamedTuple):
    """A stored name, and what members of one stack have in common."""

    name: str
    axes: int
    dtype: DType
    shape: tuple[int, ...]


def prefix_of(wanted: TargetTensor, master: str) -> str:
    """Return what stands before the parameter's name in a stored name.

    Args:
        wanted: a tensor of the model or the optimizer.
        master: how the optimizer calls an fp32 copy of a weight.
    """
    if wanted.component == "model":
        return ""
    if wanted.kind is Kind.MASTER:
        return f"{_STATE}{master}."
    leaf = _MOMENTS.get(wanted.kind)
    if leaf is None and wanted.name != _weight_of(wanted):
        leaf = named_state(wanted.name).leaf
    return f"{_STATE}{leaf}." if leaf else _STATE


def _weight_of(wanted: TargetTensor) -> str:
    """Return a tensor's name without the state that follows its weight, which is stored first."""
    if wanted.component != "optimizer" or wanted.kind is not Kind.OTHER:
        return wanted.name
    named = named_state(wanted.name)
    known = named.state is not None and named.leaf in STATES
    return named.parameter if known and named.parameter else wanted.name


def stacked(
    tensors: Mapping[str, TargetTensor], form_of: Callable[[TargetTensor], StoredForm], master: str
) -> list[StoredTensor]:
    """Return the stored tensors that hold the logical ones, in their order.

    Args:
        tensors: of the model and of the optimizer, by key.
        form_of: how a tensor is to be stored.
        master: see `prefix_of`.
    """
    groups: dict[str, list[tuple[_Form, StackedTensor]]] = defaultdict(list)
    for key, wanted in tensors.items():
        for form, member in _parts(key, wanted, form_of(wanted), master):
            groups[form.name].append((form, member))
    found = []
    for own in groups.values():
        whole = _filled(own)
        if whole is not None:
            found.append(whole)
            continue
        for _, member in own:
            wanted = tensors[member.key]
            numbered = StoredForm(False, False, form_of(wanted).halves)
            for form, part in _parts(member.key, wanted, numbered, master):
                if part.box == member.box:
                    found.append(StoredTensor(form.name, form.dtype, form.shape, (part,)))
    return found


def _parts(
    key: str, wanted: TargetTensor, form: StoredForm, master: str
) -> Iterator[tuple[_Form, StackedTensor]]:
    """Yield where a logical tensor goes: into one stored tensor, or its halves into two."""
    name, place = stored_place(_weight_of(wanted), form)
    name = prefix_of(wanted, master) + name
    if form.halves and wanted.shape and wanted.shape[0] % 2 == 0:
        rows, *rest = wanted.shape
        half = (rows // 2, *rest)
        for number, own in enumerate(halves_of(name)):
            box = Box((number * half[0], *(0,) * len(rest)), half)
            yield _Form(own, len(place), wanted.dtype, half), StackedTensor(key, place, box)
        return
    box = Box.whole(wanted.shape)
    yield _Form(name, len(place), wanted.dtype, wanted.shape), StackedTensor(key, place, box)


def _filled(own: Iterable[tuple[_Form, StackedTensor]]) -> StoredTensor | None:
    """Return the stack that the members fill to the last place; None where they do not."""
    forms, members = zip(*own, strict=True)
    form = forms[0]
    lead = tuple(1 + max(places) for places in zip(*(m.place for m in members), strict=True))
    full = len({m.place for m in members}) == len(members) == prod(lead)
    if not full or any(other != form for other in forms):
        return None
    return StoredTensor(form.name, form.dtype, (*lead, *form.shape), tuple(members))
