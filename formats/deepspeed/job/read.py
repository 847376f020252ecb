"""Read the description of a DeepSpeed job from a checkpoint: order, options, settings, numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.names import STATE, DeepSpeedFile, FileRole, deepspeed_files
from ftckpt.formats.deepspeed.states import (
    BASES,
    MASTERS,
    OPTIMIZER,
    ModelState,
    group_state,
    read_model,
)
from ftckpt.formats.deepspeed.zero.settings import SUB_GROUP_SIZE, Group, ZeroOptions
from ftckpt.formats.torch_files.values import TensorRef

from . import DeepSpeedJob


def read_job(checkpoint: DeepSpeedCheckpoint) -> DeepSpeedJob:
    """Parse the first file of each model-parallel rank.

    Raises:
        CorruptError: a rank has no file that could be read.
        UnsupportedError: ZeRO is off, or its groups cannot be told.
    """
    if not checkpoint.stage:
        raise UnsupportedError(
            "ZeRO is off in this checkpoint: it has no partitions, and DeepSpeed loads it on"
            " any number of ranks as it is, or of equally many that share experts",
            hint="ftckpt convert --to torchsave or safetensors",
        )
    whole = [DeepSpeedFile(f"zero/{STATE}", FileRole.OPTIMIZER)]
    named = [f for f in deepspeed_files(checkpoint.members()) if f.path in checkpoint.streams]
    files = {role: [f for f in named if f.role is role] for role in FileRole}
    files[FileRole.OPTIMIZER] = files[FileRole.OPTIMIZER] or [
        f for f in whole if f.path in checkpoint.streams
    ]
    states: dict[int, ModelState] = {}
    config: Any = None
    version: Any = None
    for file in files[FileRole.MODEL]:
        if file.mp not in states:
            tree = checkpoint.tree(file.path)
            states[file.mp] = read_model(file, tree, checkpoint.streams[file.path].storages)
            config = config or tree.get("ds_config")
            version = version or tree.get("ds_version")
    optimizers = files[FileRole.OPTIMIZER]
    trees = {mp: _optimizer(checkpoint, optimizers, mp) for mp in range(checkpoint.grid.mp)}
    missing = [mp for mp in trees if mp not in states]
    if missing:
        raise CorruptError(
            f"no file says which parameters model-parallel rank {missing[0]} has",
            kind="missing-rank",
            file=f"mp_rank_{missing[0]:02d}_model_states.pt",
        )
    zero = _zero_options(checkpoint, config, trees[0])
    groups: dict[int, list[Group]] = {}
    flats: dict[int, list[list[Group]]] = {}
    members = {}
    for mp, tree in trees.items():
        listed = states[mp].groups
        members[mp] = _members(checkpoint.stage, tree, len(listed))
        flats[mp] = [[listed[n] for n in part] for part in members[mp]]
        groups[mp] = [zero.parameter_group(part) for part in flats[mp]]
        masters = tree.get(MASTERS[1])
        if isinstance(masters, list) and len(masters) != len(listed):
            # Old versions list the shapes of a parameter group in one.
            flats[mp] = [zero.flat_groups(group) for group in groups[mp]]
    return DeepSpeedJob(
        checkpoint=checkpoint,
        zero=zero,
        files=files,
        states=states,
        groups=groups,
        flats=flats,
        settings={
            mp: [group for group in _param_groups(tree) if isinstance(group, dict)]
            for mp, tree in trees.items()
        },
        numbers={mp: [_numbers(tree, part) for part in members[mp]] for mp, tree in trees.items()},
        config=config,
        version=version,
    )


def _optimizer(
    checkpoint: DeepSpeedCheckpoint, files: Sequence[DeepSpeedFile], mp: int
) -> Mapping[str, Any]:
    """Return the optimizer's state in the first file of a model-parallel rank."""
    file = next((f for f in files if f.mp == mp), files[0] if files else None)
    if file is None:
        raise CorruptError(
            "no file holds the optimizer's state: learning rates and loss scale are not known",
            kind="missing-rank",
            file=f"zero_pp_rank_0_mp_rank_{mp:02d}_optim_states.pt",
        )
    tree = checkpoint.tree(file.path)
    inner = tree.get(OPTIMIZER) if file.dp is not None else tree
    return inner if isinstance(inner, dict) else {}


def _zero_options(
    checkpoint: DeepSpeedCheckpoint, config: Any, optimizer: Mapping[str, Any]
) -> ZeroOptions:
    """Return how the job partitioned, by its `ds_config` and the state of its optimizer."""
    config = config if isinstance(config, dict) else {}
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    size = zero.get("sub_group_size")
    bf16_optimizer = MASTERS[0] in optimizer and "zero_stage" not in optimizer
    names = [name for name in checkpoint.members() if name.endswith("optim_states.pt")]
    bf16 = config.get("bf16")
    prefix = "bf16_" if isinstance(bf16, dict) and bf16.get("enabled") is True else ""
    has_gaps = any(any(group) for rank in checkpoint.gaps.values() for group in rank)
    return ZeroOptions(
        grid=checkpoint.grid,
        experts=checkpoint.experts,
        stage=checkpoint.stage,
        prefix=names[0].partition("zero_pp_rank")[0] if names else prefix,
        bf16_optimizer=bf16_optimizer,
        elastic=isinstance(optimizer.get(BASES[0]), list),
        round_robin=zero.get("round_robin_gradients") is True and not bf16_optimizer,
        aligned=has_gaps or (zero.get("parameter_alignment") is True and not bf16_optimizer),
        sub_group_size=int(size) if isinstance(size, (int, float)) else SUB_GROUP_SIZE,
    )


def _members(stage: int, optimizer: Mapping[str, Any], count: int) -> list[list[int]]:
    """Return the flat groups of each parameter group, by number.

    Raises:
        UnsupportedError: nothing says which sub-groups make up a parameter group.
    """
    one_each = [[number] for number in range(count)]
    if stage < 3:
        return one_each
    groups = _param_groups(optimizer)
    members = [group.get("params") for group in groups if isinstance(group, dict)]
    lists = [m for m in members if isinstance(m, list) and all(type(n) is int for n in m)]
    if len(lists) == len(groups) and sorted(n for m in lists for n in m) == [*range(count)]:
        return lists
    if len(groups) == count:  # old versions list the shapes of a parameter group in one
        return one_each
    raise UnsupportedError(
        f"nothing says which of {count} sub-groups belong to which of {len(groups)} parameter"
        " groups of the optimizer"
    )


def _param_groups(optimizer: Mapping[str, Any]) -> list[Any]:
    for holder in (*(optimizer.get(key) for key in BASES), optimizer):
        found = holder.get("param_groups") if isinstance(holder, dict) else None
        if isinstance(found, list):
            return found
    return []


def _numbers(optimizer: Mapping[str, Any], flats: Sequence[int]) -> dict[str, Any]:
    """Return the states of a parameter group that are not tensors."""
    base = next((optimizer[key] for key in BASES if key in optimizer), None)
    state = group_state(base, flats[0]) if flats else {}
    return {key: v for key, v in state.items() if not isinstance(v, TensorRef)}
