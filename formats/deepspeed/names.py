"""The names of DeepSpeed's files, and what a set of such names must be.

`D` is the ZeRO data-parallel partition ("pp_rank" in the names means that), `MM` the index in the
model-parallel group: `MM = pp * tp_degree + tp`.

    mp_rank_MM_model_states.pt                       weights and state, stages 0 to 2
    zero_pp_rank_D_mp_rank_MM_model_states.pt        the same, stage 3
    [bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt one partition of the optimizer
    layer_II[-model_TT]-model_states.pt              one layer of a pipeline, one tensor slice
    layer_L_expert_E_mp_rank_MM_model_states.pt      expert E of the Lth layer of experts
    expp_rank_X_mp_rank_MM_optim_states.pt           the optimizer of expert-parallel rank X

Source: `deepspeed/runtime/engine.py` (`_get_ckpt_name`, `_get_rank_zero_ckpt_name`,
`_get_expert_ckpt_name`, `_get_optimizer_ckpt_name`) and `runtime/pipe/module.py`
(`ckpt_layer_path`) of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from ftckpt.errors import UnsupportedError
from ftckpt.findings import Finding, finding


class FileRole(StrEnum):
    """What a file holds."""

    MODEL = "model_states"
    OPTIMIZER = "optim_states"
    LAYER = "layer"
    EXPERT = "expert"
    EXPERT_OPTIMIZER = "expert_optim_states"


class DeepSpeedFile(NamedTuple):
    """One file; what its name does not say is None.

    Attributes:
        path: relative to the checkpoint.
        role: what it holds.
        dp: its partition, D.
        mp: its model-parallel rank, MM; of a layer its tensor slice, TT.
        layer: index of the layer in the pipeline, or among the layers of experts.
        expert: number of the expert; of an expert-parallel optimizer its rank, X.
    """

    path: str
    role: FileRole
    dp: int | None = None
    mp: int = 0
    layer: int | None = None
    expert: int | None = None


# More digits than any cluster has ranks would only be somebody's joke on int(). Files of old
# versions lack the underscore before "optim_states" and can have the prefix fp16_.
_N = r"(\d{1,7})"
_ZERO = re.compile(rf"(?:bf16_|fp16_)?zero_pp_rank_{_N}_mp_rank_{_N}_?(optim|model)_states\.pt")
_MODEL = re.compile(rf"mp_rank_{_N}_model_states\.pt")
_LAYER = re.compile(rf"layer_{_N}-(?:model_{_N}-)?model_states\.pt")
_EXPERT = re.compile(rf"layer_{_N}_expert_{_N}_mp_rank_{_N}_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(rf"expp_rank_{_N}_mp_rank_{_N}_optim_states\.pt")
# Before 0.5.8 one file held an expert of all layers.
_OLD_EXPERT = rf"expert_{_N}_mp_rank_{_N}_model_states\.pt"
_OFFLOADED = "offloaded_tensors/"
# The folder in which a universal checkpoint keeps one folder a parameter.
ZERO = "zero"
# In that folder: what is not a parameter's. Beside it: where the converter works.
STATE = "optimizer_state.pt"
TMP = "tmp"
# A set that lacks more files than this is told in one sentence.
SHOWN = 64


def deepspeed_file(path: str) -> DeepSpeedFile | None:
    """Return what a file's name says, or None where it is none of DeepSpeed's."""
    if match := _ZERO.fullmatch(path):
        role = FileRole.OPTIMIZER if match[3] == "optim" else FileRole.MODEL
        return DeepSpeedFile(path, role, int(match[1]), int(match[2]))
    if match := _MODEL.fullmatch(path):
        return DeepSpeedFile(path, FileRole.MODEL, None, int(match[1]))
    if match := _LAYER.fullmatch(path):
        return DeepSpeedFile(path, FileRole.LAYER, None, int(match[2] or 0), int(match[1]))
    if match := _EXPERT.fullmatch(path):
        layer, expert, mp = map(int, match.groups())
        return DeepSpeedFile(path, FileRole.EXPERT, None, mp, layer, expert)
    if match := _EXPERT_OPTIMIZER.fullmatch(path):
        mp, expert = int(match[2]), int(match[1])
        return DeepSpeedFile(path, FileRole.EXPERT_OPTIMIZER, None, mp, None, expert)
    return None


def deepspeed_files(names: Iterable[str]) -> list[DeepSpeedFile]:
    """Return the files among `names`, by role, model-parallel rank, layer and partition."""
    found = [file for file in map(deepspeed_file, names) if file is not None]
    order = list(FileRole)

    def place(file: DeepSpeedFile) -> tuple[int | str, ...]:
        return order.index(file.role), file.mp, file.layer or 0, file.expert or 0, file.dp or 0

    return sorted(found, key=lambda file: (*place(file), file.path))


def refuse_unread(names: Iterable[str]) -> None:
    """Refuse a checkpoint that keeps a part of its state in files that are not read.

    Raises:
        UnsupportedError: experts of a version before 0.5.8, or tensors offloaded to NVMe.
    """
    for name in sorted(names):
        if re.fullmatch(_OLD_EXPERT, name):
            raise UnsupportedError(
                f"{name} is of a version of DeepSpeed before 0.5.8, whose files of experts do not"
                " say of which layer they are",
                hint="load it with DeepSpeed and save it again",
                file=name,
            )
        if name.startswith(_OFFLOADED):
            raise UnsupportedError(
                f"{name} is a tensor that was offloaded to NVMe, as raw swap files with no shapes",
                hint="load it with the job that wrote it, and save without offloading to NVMe",
                file=name,
            )


def check_grid(
    files: Iterable[DeepSpeedFile],
    *,
    mp: int,
    dp: int,
    tp: int,
    stage: int,
    roles: Collection[FileRole],
) -> Iterator[Finding]:
    """Yield what keeps the files from being a full grid of ranks.

    Args:
        files: all files of the checkpoint.
        mp: number of model-parallel ranks, pipeline times tensor.
        dp: number of partitions.
        tp: number of tensor slices.
        stage: ZeRO stage; 0 has no files of partitions, 3 has all files by partition.
        roles: of which there must be a file for every rank.
    """
    files = list(files)
    for role in (FileRole.MODEL, FileRole.OPTIMIZER):
        own = [f for f in files if f.role is role]
        split = stage == 3 if role is FileRole.MODEL else stage > 0
        held = {(f.mp, f.dp) for f in own}
        if role not in roles or (role is FileRole.OPTIMIZER and not split):
            continue
        yield from _absent(role, own, held, (mp, dp if split else None))
    layers: dict[int, set[int]] = {}
    for file in files:
        if file.role is FileRole.LAYER and file.layer is not None:
            layers.setdefault(file.layer, set()).add(file.mp)
    for layer, slices in sorted(layers.items()):
        for absent in sorted(set(range(tp)) - slices):
            name = f"layer_{layer:02d}-model_{absent:02d}-model_states.pt"
            what = f"{name} is missing: layer {layer} has no file of tensor slice {absent}"
            yield finding("missing-rank", what, file=name)


def _absent(
    role: FileRole,
    own: list[DeepSpeedFile],
    held: set[tuple[int, int | None]],
    grid: tuple[int, int | None],
) -> Iterator[Finding]:
    """Yield the places of a grid that hold no file; the grid may be absurdly large."""
    mp, dp = grid
    prefix = next((f.path.partition("zero_pp_rank")[0] for f in own if f.dp is not None), "")
    splits = [None] if dp is None else range(dp)
    absent = ((m, d) for m in range(mp) for d in splits if (m, d) not in held)
    shown = 0
    for m, d in islice(absent, SHOWN):
        shown += 1
        partition = "" if d is None else f"{prefix}zero_pp_rank_{d}_"
        name = f"{partition}mp_rank_{m:02d}_{role}.pt"
        of = f"model-parallel rank {m}" + ("" if d is None else f", partition {d}")
        yield finding("missing-rank", f"{name} is missing: {of} has no {role} file", file=name)
    inside = sum(m < mp and (d or 0) < (dp or 1) for m, d in held)
    more = mp * (dp or 1) - inside - shown
    if more > 0:
        yield finding("missing-rank", f"{more} more ranks have no {role} file")
