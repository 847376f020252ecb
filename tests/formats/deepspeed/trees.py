"""DeepSpeed's files as comparable data, and a plain model of what its engine saves.

The model cuts whole arrays by concatenating, padding and chunking, as the engine does with tensors;
it shares no arithmetic with the readers and writers.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import chain
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ftckpt.checkpoint import Extent
from ftckpt.checkpoint.read_tensor import dense_strides
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.names import deepspeed_file
from ftckpt.formats.pickles.inert import Inert
from ftckpt.formats.torch_files.values import TensorRef

# How tensor slices cut what `deepspeed_grids` names.
INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"\d+\.same"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.row"],
}
# Where stage 3 keeps its masters.
FLATS = "fp32_flat_groups"


def trees(checkpoint: DeepSpeedCheckpoint) -> dict[str, Any]:
    """Return every file as plain data: tensors by type, shape and bytes, wherever they are kept."""
    made = {path: _plain(checkpoint, path, checkpoint.tree(path)) for path in checkpoint.files}
    for path, tree in made.items():
        file = deepspeed_file(path)
        if file is not None and FLATS in tree.get("optimizer_state_dict", {}):
            flats = tree["optimizer_state_dict"][FLATS]
            told = tree["optimizer_state_dict"].get("ds_zero_partition_groups")
            for number, group in enumerate(checkpoint.groups[file.mp]):
                rank, ranks = file.dp or 0, checkpoint.grid.dp
                if told is not None:  # AutoEP partitions experts over other ranks
                    rank, ranks = (told[number][f"partition_{key}"] for key in ("rank", "count"))
                flats[number] = _zeroed(flats[number], group, rank, ranks)
    return made


def _zeroed(flat: Any, group: Any, rank: int, ranks: int) -> Any:
    """Return masters of a sub-group with zeros for padding: the engine leaves what was there."""
    dtype, shape, data = flat
    values, at = torch.frombuffer(bytearray(data), dtype=torch.float32), 0
    for size in map(prod, group.values()):
        run = -(-size // ranks)
        values[at + min(max(size - rank * run, 0), run) : at + run] = 0
        at += run
    assert at == values.numel()
    return (dtype, shape, values.numpy().tobytes())


def _plain(checkpoint: DeepSpeedCheckpoint, path: str, value: Any) -> Any:
    if isinstance(value, TensorRef):
        assert value.strides == dense_strides(value.shape)
        place = checkpoint.streams[path].storages[value.key].extent
        size = value.dtype.itemsize
        extent = Extent(place.file, place.offset + value.storage_offset * size, value.numel * size)
        return (value.dtype.name, value.shape, checkpoint.source.read(*extent))
    if isinstance(value, dict):
        return {key: _plain(checkpoint, path, member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(checkpoint, path, member) for member in value]
    if isinstance(value, Inert):
        state = _plain(checkpoint, path, value.state)
        return (value.qualname, value.args, value.called, state)
    return value


class Job(NamedTuple):
    """A job of one model-parallel rank, or one such rank of a larger job.

    Attributes:
        groups: shapes by name, a mapping for each parameter group.
        dp, stage, sub_group, round_robin, aligned: as DeepSpeed's configuration has them.
        held: values by kind and name; None for made-up ones.
        step: how far it has come.
        settings: of every parameter group; None for other ones in each.
        name: in its configuration.
        counted: whether steps are plain numbers, as a fused Adam has them.
    """

    groups: Sequence[dict[str, tuple[int, ...]]]
    dp: int
    stage: int
    sub_group: int = 1000
    round_robin: bool = False
    aligned: bool = False
    held: Sequence[dict[str, torch.Tensor]] | None = None
    step: int = 5
    settings: dict[str, float] | None = None
    name: str = ""
    counted: bool = False

    def values(self, kind: int) -> dict[str, torch.Tensor]:
        """Return values of all parameters: 0 masters, 1 and 2 the moments."""
        if self.held is not None:
            return self.held[kind]
        shapes = {name: shape for group in self.groups for name, shape in group.items()}
        return {
            name: torch.arange(1, 1 + torch.Size(shape).numel()).view(shape) + 1000 * n + kind / 4
            for n, (name, shape) in enumerate(shapes.items())
        }


class Place(NamedTuple):
    """A model-parallel rank of a larger job: its number, and the sizes of the groups."""

    mp: int = 0
    pp: int = 1
    tp: int = 1


def save_job(job: Job, folder: Path, place: Place | None = None) -> Path:
    """Save what the engine would, of the whole job or of one model-parallel rank.

    Args:
        job: what is saved.
        folder: where.
        place: the rank; of several stages it has no weights, for those are in files of layers, and
            no parameters but those of its groups.
    """
    folder.mkdir(parents=True, exist_ok=place is not None)
    mp, pp, tp = place or Place()
    zero = {"stage": 0, "sub_group_size": job.sub_group, "round_robin_gradients": job.round_robin,
            "parameter_alignment": job.aligned}  # fmt: skip
    around = {"ds_config": {"bf16": {"enabled": True}, "zero_optimization": zero, "job": job.name},
              "ds_version": "0.19.8"}  # fmt: skip
    with at_home():
        flats, members = _flats(job)
        weights = {name: value.bfloat16() for name, value in job.values(0).items()}
        empty = torch.empty(0, dtype=torch.bfloat16)
        frozen = torch.arange(7.0).bfloat16()
        for rank in range(job.dp) if job.stage == 3 else [None]:
            whole = rank is None
            module = {n: value if whole else empty.clone() for n, value in weights.items()}
            if place is None:
                module |= {"frozen": frozen if whole else empty.clone(), "seen": torch.tensor(3)}
            size = -(-7 // job.dp)
            run = torch.cat([frozen, frozen.new_zeros(size * job.dp - 7)]).chunk(job.dp)
            state: dict[str, Any] = {
                "module": None if pp > 1 else OrderedDict(module),
                "buffer_names": ["seen"] if place is None else [], "optimizer": None,
                "param_shapes": [
                    OrderedDict((n, torch.Size(s)) for n, s in flat.items()) for flat in flats
                ],
                "frozen_param_shapes": OrderedDict(frozen=frozen.shape),
                "frozen_param_fragments": OrderedDict(frozen=frozen if whole else run[rank or 0]),
                "shared_params": {}, "lr_scheduler": {"last_epoch": job.step}, "skipped_steps": 0,
                "global_steps": job.step, "dp_world_size": job.dp, "mp_world_size": pp * tp,
                "client": {"seed": torch.arange(3) + job.step}, **around,
            }  # fmt: skip
            if place is not None:
                sizes = {"pp_degree": pp, "tp_degree": tp}
                state["args"] = Namespace(tensor_model_parallel_size=tp, rank=mp, seen=job.step)
                state |= {
                    "checkpoint_parallel_dimensions": sizes,
                    "universal_checkpoint_info": INFO,
                    "frozen_param_shapes": OrderedDict(),
                    "frozen_param_fragments": OrderedDict(),
                }
            if job.stage == 1:
                state |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
            name = f"mp_rank_{mp:02d}_model_states.pt"
            torch.save(state, folder / (name if whole else f"zero_pp_rank_{rank}_{name}"))
        for rank in range(job.dp):
            inner = _optimizer(job, flats, members, rank)
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": inner, **around}, folder / name)
    return folder


def _flats(job: Job) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the flat groups, and which of them each parameter group has."""
    flats: list[dict[str, Any]] = []
    members: list[list[int]] = []
    for group in job.groups:
        own: list[dict[str, Any]] = [{}]
        total = 0
        items = list(group.items())
        if job.round_robin and job.stage < 3:
            items = list(chain(*(items[rank :: job.dp] for rank in range(job.dp))))
        for name, shape in items:
            if job.stage == 3 and total >= job.sub_group:
                own.append({})
                total = 0
            own[-1][name] = shape
            total += -(-torch.Size(shape).numel() // job.dp)
        members.append(list(range(len(flats), len(flats) + len(own))))
        flats += own
    return flats, members


def _optimizer(job: Job, flats: Any, members: Any, rank: int) -> dict[str, Any]:
    held = [[_cut(job, job.values(kind), flat)[rank] for flat in flats] for kind in range(3)]
    numels = [sum(torch.Size(s).numel() for s in flat.values()) for flat in flats]
    base = {
        "state": {
            n: {
                "step": job.step if job.counted else torch.tensor(float(job.step)),
                "exp_avg": held[1][n],
                "exp_avg_sq": held[2][n],
            }
            for n in range(len(flats))
        },
        "param_groups": [
            {**(job.settings or {"lr": 0.5 + n}), "params": ids} for n, ids in enumerate(members)
        ],
    }
    found = {"loss_scaler": None, "dynamic_loss_scale": False, "overflow": False,
             "zero_stage": ZeroStageEnum(job.stage)}  # fmt: skip
    if job.stage == 3:
        return found | {"partition_count": job.dp, "optimizer_state_dict": base,
                        "fp32_flat_groups": held[0]}  # fmt: skip
    gaps = [_gaps(job, flat) for flat in flats]
    ends = [n + sum(gap) for n, gap in zip(numels, gaps, strict=True)]
    sizes = [part.numel() for part in held[0]]
    lean = [min(max(e - rank * p, 0), p) for e, p in zip(ends, sizes, strict=True)]
    return found | {
        "ds_version": "0.19.8", "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [
            part[:n] for part, n in zip(held[0], lean, strict=True)
        ],
        "group_paddings": [p - n for p, n in zip(sizes, lean, strict=True)],
        "param_alignment_paddings": gaps, "partition_count": [job.dp] * len(flats),
        "param_slice_mappings": [_mapping(job, flat, rank) for flat in flats],
    }  # fmt: skip


def _gaps(job: Job, flat: dict[str, Any]) -> list[int]:
    found: list[int] = []
    at = 0
    for shape in flat.values():
        at += torch.Size(shape).numel()
        found.append(-at % 8 if job.aligned and len(found) + 1 < len(flat) else 0)
        at += found[-1]
    return found


def _cut(job: Job, values: dict[str, torch.Tensor], flat: dict[str, Any]) -> list[torch.Tensor]:
    """Return each rank's flat tensor."""
    if job.stage == 3:
        parts: list[list[torch.Tensor]] = [[] for _ in range(job.dp)]
        for name in flat:
            value = values[name].flatten()
            padded = torch.cat([value, value.new_zeros(-value.numel() % job.dp)])
            for part, run in zip(parts, padded.view(job.dp, -1), strict=True):
                part.append(run)
        return [torch.cat(part) for part in parts]
    pieces: list[torch.Tensor] = []
    for name, gap in zip(flat, _gaps(job, flat), strict=True):
        pieces += [values[name].flatten(), torch.zeros(gap)]
    whole = torch.cat(pieces)
    whole = torch.cat([whole, whole.new_zeros(-whole.numel() % (2 * job.dp))])
    return [part.clone() for part in whole.view(job.dp, -1)]


def _mapping(job: Job, flat: dict[str, Any], rank: int) -> Any:
    """Find each parameter in a rank's part by marking its elements."""
    marks = {n: torch.full(s, float(number + 1)) for number, (n, s) in enumerate(flat.items())}
    part = _cut(job, marks, flat)[rank]
    found = OrderedDict()
    for number, name in enumerate(flat):
        places = (part == number + 1).nonzero().flatten().tolist()
        if places:
            found[name] = fragment_address(numel=len(places), start=places[0])
    return found


class ZeroStageEnum(IntEnum):
    STATES = 1
    GRADIENTS = 2
    WEIGHTS = 3


class fragment_address:
    def __init__(self, **fields: int) -> None:
        self.__dict__.update(fields)


# Where DeepSpeed has these classes, and so what a pickle must name.
_HOMES = {
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.utils.tensor_fragment": fragment_address,
}
for _home, _class in _HOMES.items():
    _class.__module__ = _home


@contextmanager
def at_home() -> Iterator[None]:
    """Let pickle find the classes where DeepSpeed has them."""
    for home, kind in _HOMES.items():
        parts = home.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            sys.modules.setdefault(name, ModuleType(name))
        setattr(sys.modules[home], kind.__name__, kind)
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]
