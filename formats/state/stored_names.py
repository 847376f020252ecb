"""Classify a name as training programs store it: component, kind, parameter.

torch flattens the saved state_dict to dotted names and keeps the path of keys in `planner_data`.
The path decides; a dot never does, because keys may hold dots (Hugging Face's own `model.`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.optimizer_states import KINDS

from .vocabulary import AVERAGES, MODELS, OPTIMIZERS

# How Megatron-Core names its common state: a file beside the store, or objects in it.
_COMMON = ("common.pt", "common_state/")

_GROUP = r"(?a)(?:^|\.)optimizer\.distributed\.dp_group_idx_\d+\.optimizer(?:/|$)"

# BatchNorm's buffers; floating point, so that only their names tell them from parameters.
_BUFFER_LEAVES = ("running_mean", "running_var", "num_batches_tracked")
# Looked up once: an enum's members are found by a slow search, and there are many tensors.
_BUFFER, _PARAM = Kind.BUFFER, Kind.PARAM


class StoredName(NamedTuple):
    """Component, kind and name of one tensor."""

    component: str
    kind: Kind
    name: str


def place(stored: str, path: Sequence[str | int], dtype: DType) -> StoredName:
    """Classify one tensor.

    Args:
        stored: the dotted name in the metadata.
        path: its `planner_data` path; empty where the planner kept none.
        dtype: its element type: integers and booleans are never trained.
    """
    if len(path) > 1 and path[0] in MODELS:  # most of a checkpoint
        name = ".".join(map(str, path[1:]))
        return StoredName("model", weight_kind(name, dtype), name)
    parts = list(map(str, path)) or [stored]
    top, rest = parts[0], parts[1:]
    if rest and top in MODELS:
        return place("", parts, dtype)
    if rest and top in OPTIMIZERS:
        return _optimizer(rest)
    if rest and top in AVERAGES:
        return StoredName("ema", weight_kind(rest[-1], dtype), ".".join(rest))
    if rest:
        return StoredName(f"extra:{top}", Kind.OTHER, ".".join(rest))
    # One key, so a dotted one was written flat: torchtitan keeps the model at the top and torch's
    # `flatten_optimizer_state_dict` writes `state.<fqn>.<leaf>` below `optimizer.`.
    for prefix in ("optimizer.", "optim."):
        if stored.startswith((prefix + "state.", prefix + "distributed.")):
            return _optimizer([stored.removeprefix(prefix)])
    return StoredName("model", weight_kind(stored, dtype), stored)


def weight_kind(name: str, dtype: DType) -> Kind:
    """Return what a tensor of a state_dict is: integers and BatchNorm's statistics are buffers."""
    if dtype.family != "float" and dtype.family != "complex":
        return _BUFFER
    if name.endswith(_BUFFER_LEAVES) and name.rpartition(".")[2] in _BUFFER_LEAVES:
        return _BUFFER
    return _PARAM


def _optimizer(rest: Sequence[str]) -> StoredName:
    """Classify what lies below the optimizer's key: `state`, the parameter, the leaf."""
    if len(rest) == 1 and rest[0].startswith("state."):
        name, _, leaf = rest[0].removeprefix("state.").rpartition(".")
    elif len(rest) >= 3 and rest[0] == "state":
        name, leaf = ".".join(rest[1:-1]), rest[-1]
    else:
        return StoredName("optimizer", Kind.OTHER, ".".join(rest))
    first, _, tail = name.partition(".")
    if leaf not in KINDS and first in KINDS:
        # Megatron-Core puts the kind first: `optimizer.state.exp_avg.<parameter>`.
        return StoredName("optimizer", KINDS[first], f"{tail}.{leaf}")
    kind = KINDS.get(leaf)
    if kind is None:
        return StoredName("optimizer", Kind.OTHER, f"{name}.{leaf}" if name else leaf)
    return StoredName("optimizer", kind, name)


def is_of_bitsandbytes(name: str) -> bool:
    """Return whether a name in a state dict is that of a record of bitsandbytes' weights."""
    return ".quant_state.bitsandbytes__" in name or name.endswith(".SCB")


def is_group_settings(name: str) -> bool:
    """Whether an object holds the optimizer's settings of one group of Megatron's data ranks."""
    return re.search(_GROUP, name) is not None


def is_common(name: str) -> bool:
    """Return whether an object is Megatron's common state."""
    file, folder = _COMMON
    return name == file or name.startswith(folder)
