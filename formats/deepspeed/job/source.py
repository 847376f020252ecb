"""Read what a writer needs of a DeepSpeed source besides tensors: order, options, numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.job import Group, job_of
from ftckpt.formats.deepspeed.names import STATE, DeepSpeedFile, FileRole, deepspeed_files
from ftckpt.formats.deepspeed.states import BASES, MASTERS, OPTIMIZER, ModelState, read_model
from ftckpt.formats.torch_files.values import TensorRef

from .models import Models


class DeepSpeedSource:
    """A DeepSpeed checkpoint, read again for writing.

    Attributes:
        models: its parameters.
        job: that wrote it.
        files: its files by role; of a universal one the file of the optimizer's other state.
        groups: by model-parallel rank, its parameter groups in the order of the optimizer.
        flats: by model-parallel rank and parameter group, the flat groups that were partitioned.
        settings: by model-parallel rank and parameter group, the base optimizer's settings of it;
            none where the optimizer's form has none.
        numbers: by model-parallel rank and parameter group, states that are no tensors.
        config, version: of DeepSpeed, as a model's file records them.
    """

    def __init__(self, checkpoint: DeepSpeedCheckpoint) -> None:
        """Parse the first file of each model-parallel rank.

        Raises:
            CorruptError: a rank has no file that could be read.
            UnsupportedError: ZeRO is off, or its groups cannot be told.
        """
        if not checkpoint.stage:
            raise UnsupportedError(
                "ZeRO is off in this checkpoint: it has no partitions, and DeepSpeed loads it on"
                " any number of ranks as it is",
                hint="ftckpt convert --to torchsave or safetensors",
            )
        self._checkpoint = checkpoint
        whole = [DeepSpeedFile(f"zero/{STATE}", FileRole.OPTIMIZER)]
        named = [f for f in deepspeed_files(checkpoint.members()) if f.path in checkpoint.streams]
        partitioned = [f for f in named if f.role is FileRole.OPTIMIZER]
        self.files: Mapping[FileRole, Sequence[DeepSpeedFile]] = {
            FileRole.MODEL: [f for f in named if f.role is FileRole.MODEL],
            FileRole.LAYER: [f for f in named if f.role is FileRole.LAYER],
            FileRole.OPTIMIZER: partitioned or [f for f in whole if f.path in checkpoint.streams],
        }
        states: dict[int, ModelState] = {}
        self.config: Any = None
        self.version: Any = None
        for file in self.files[FileRole.MODEL]:
            if file.mp not in states:
                tree = checkpoint.tree(file.path)
                storages = checkpoint.streams[file.path].storages
                states[file.mp] = read_model(file, tree, storages)
                self.config = self.config or tree.get("ds_config")
                self.version = self.version or tree.get("ds_version")
        self.models = Models(checkpoint, states)
        trees = {mp: self._optimizer(mp) for mp in range(checkpoint.grid.mp)}
        missing = [mp for mp in trees if mp not in states]
        if missing:
            raise CorruptError(
                f"no file says which parameters model-parallel rank {missing[0]} has",
                kind="missing-rank",
                file=f"mp_rank_{missing[0]:02d}_model_states.pt",
            )
        self.job = job_of(checkpoint, self.config, trees[0])
        self.groups: dict[int, list[Group]] = {}
        self.flats: dict[int, list[list[Group]]] = {}
        self.numbers: dict[int, list[dict[str, Any]]] = {}
        self.settings: dict[int, list[dict[str, Any]]] = {}
        for mp, tree in trees.items():
            members = self._members(tree, len(states[mp].groups))
            flat = states[mp].groups
            flats = [[flat[n] for n in part] for part in members]
            self.groups[mp] = [self.job.joined(part) for part in flats]
            masters = tree.get(MASTERS[1])
            if isinstance(masters, list) and len(masters) != len(flat):
                # Old versions list the shapes of a parameter group in one.
                flats = [self.job.partitioned(group) for group in self.groups[mp]]
            self.flats[mp] = flats
            self.numbers[mp] = [_numbers(tree, part[:1]) for part in members]
            self.settings[mp] = [group for group in _groups(tree) if isinstance(group, dict)]

    def _optimizer(self, mp: int) -> Mapping[str, Any]:
        """Return the optimizer's state in the first file of a model-parallel rank."""
        files = self.files[FileRole.OPTIMIZER]
        file = next((f for f in files if f.mp == mp), files[0] if files else None)
        if file is None:
            raise CorruptError(
                "no file holds the optimizer's state: learning rates and loss scale are not known",
                kind="missing-rank",
                file=f"zero_pp_rank_0_mp_rank_{mp:02d}_optim_states.pt",
            )
        tree = self._checkpoint.tree(file.path)
        inner = tree.get(OPTIMIZER) if file.dp is not None else tree
        return inner if isinstance(inner, dict) else {}

    def _members(self, optimizer: Mapping[str, Any], count: int) -> list[list[int]]:
        """Return the flat groups of each parameter group, by number.

        Raises:
            UnsupportedError: nothing says which sub-groups make up a parameter group.
        """
        if self._checkpoint.stage < 3:
            return [[number] for number in range(count)]
        groups = _groups(optimizer)
        members = [group.get("params") for group in groups if isinstance(group, dict)]
        lists = [m for m in members if isinstance(m, list) and all(type(n) is int for n in m)]
        if len(lists) == len(groups) and sorted(n for m in lists for n in m) == [*range(count)]:
            return lists
        if len(groups) == count:  # old versions list the shapes of a parameter group in one
            return [[number] for number in range(count)]
        raise UnsupportedError(
            f"nothing says which of {count} sub-groups belong to which of {len(groups)} parameter"
            " groups of the optimizer"
        )


def _groups(optimizer: Mapping[str, Any]) -> list[Any]:
    for holder in (*(optimizer.get(key) for key in BASES), optimizer):
        found = holder.get("param_groups") if isinstance(holder, dict) else None
        if isinstance(found, list):
            return found
    return []


def _numbers(optimizer: Mapping[str, Any], groups: Sequence[int]) -> dict[str, Any]:
    """Return the states of a group that are no tensors."""
    base = next((optimizer[key] for key in BASES if key in optimizer), None)
    states = base.get("state") if isinstance(base, dict) else base
    for number in groups:
        if isinstance(states, dict):
            state = states.get(number)
        else:
            state = states[number] if isinstance(states, list) and number < len(states) else None
        if isinstance(state, dict):
            return {key: v for key, v in state.items() if not isinstance(v, TensorRef)}
    return {}
