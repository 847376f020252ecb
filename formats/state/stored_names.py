"""Classify a name as training programs store it: component, kind, parameter.

torch flattens the saved state_dict to dotted names and keeps the path of keys in `planner_data`.
The path decides; a dot never does, because keys may hold dots (Hugging Face's own `model.`).

Find weights that are tied: two names whose bytes are the same bytes of the same files.

The keys at the top of a training state, by what lies below them: one table for all formats.

Trainers agree on little but these words. Every format that finds a state under keys reads this
table, so that one state has the same names whichever format it was saved in. A word decides exactly
and never as a prefix. Below a key that is not listed, the content decides (`TrainingTree`,
`find_homes`).

Sources, besides torch's own `get_state_dict`: Lightning (`state_dict`, `optimizer_states`), timm
(`state_dict_ema`), fairseq (`last_optimizer_state`), icefall (`model_avg`), OpenAI's guided
diffusion and lucidrains (`ema`, `ema_model`), CycleGAN and StyleGAN descendants (`netG`, `G_ema`),
HiFi-GAN (`generator`), flax and t5x (`params`, `opt_state`, `target`), cleanrl and stable-baselines
(`policy`, `actor`, `critic`), DINO and MoCo (`student`, `teacher`), OpenNMT (`model`, `generator`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ftckpt.checkpoint import Kind, TensorInfo
from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.optimizer_states import KINDS


def aliases_of(tensors: Iterable[TensorInfo]) -> dict[str, str]:
    """Return the tensors whose pieces are the very bytes of an earlier one: key -> its key."""
    owners: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for tensor in tensors:
        if tensor.numel and tensor.pieces:
            bytes_of = tuple((p.box, p.extent, p.strides) for p in tensor.pieces)
            owner = owners.setdefault(bytes_of, tensor.key)
            if owner != tensor.key:
                aliases[tensor.key] = owner
    return aliases


# The model as a whole; where several stand side by side, the first in this order is the model.
MODEL: tuple[str, ...] = (
    "model", "state_dict", "model_state_dict", "module", "net", "network", "weights", "params",
    "model_state", "model_weights", "parameters", "model_dict", "net_state_dict", "net_dict",
    "network_state_dict", "module_state_dict", "model_params", "sd", "nets",
)  # fmt: skip
# One of the networks of a training. Alone it is the model; beside others, each keeps its key.
NETWORK: tuple[str, ...] = (
    "generator", "discriminator", "gen", "disc", "netG", "netD", "net_g", "net_d", "G", "D",
    "generator_state_dict", "discriminator_state_dict", "G_state_dict", "D_state_dict",
    "encoder", "decoder", "encoder_state_dict", "decoder_state_dict", "backbone", "unet",
    "policy", "actor", "critic", "policy_net", "value_net", "q_net", "student", "denoiser",
    "policy_state_dict", "actor_state_dict", "critic_state_dict", "student_state_dict",
    "text_encoder", "mpd", "msd",
)  # fmt: skip
OPTIMIZER: tuple[str, ...] = (
    "optimizer", "optim", "optimizer_state_dict", "optim_state_dict", "optimizer_state",
    "optimizers", "optimizer_states", "opt", "opt_state", "opt_state_dict", "optimizer_0",
    "optim_state", "last_optimizer_state", "optim_dict", "optimizer_dict", "optimizers_state_dict",
    "optims",
)  # fmt: skip
AVERAGE: tuple[str, ...] = (
    "ema", "ema_model", "model_ema", "ema_state_dict", "ema_state", "model_ema_state_dict",
    "averaging_state", "ema_params", "state_dict_ema", "model_avg", "avg_model", "averaged_model",
    "model_average", "swa_model", "swa_state_dict", "ema_net", "ema_weights", "ema_generator",
    "g_ema", "G_ema", "netG_ema", "params_ema", "shadow_params", "ema_model_state_dict",
)  # fmt: skip

MODELS = frozenset(MODEL)
NETWORKS = frozenset(NETWORK)
OPTIMIZERS = frozenset(OPTIMIZER)
AVERAGES = frozenset(AVERAGE)
KNOWN = MODELS | NETWORKS | OPTIMIZERS | AVERAGES

# Bytes of a generator's state as a tensor of uint8: c10's CPUGeneratorImplState, and the seed and
# offset of a device.
CPU_GENERATOR, DEVICE_GENERATOR = 5056, 16
_RANDOM = ("rng", "random", "generator", "seed")


def is_generator(name: str, dtype: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor is the state of a random generator, and so never a weight.

    Args:
        name: where it stands, dotted.
        dtype: the name of its element type.
        shape: in elements.
    """
    if dtype != "uint8" or len(shape) != 1:
        return False
    if shape[0] == CPU_GENERATOR:
        return ".quant_state." not in name
    return shape[0] == DEVICE_GENERATOR and any(word in name.lower() for word in _RANDOM)


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
