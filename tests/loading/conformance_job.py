"""One rank of a job that loads many checkpoints, each into tensors divided in several ways.

Arguments: a JSON file with `{"places": [...], "flags": {...}}`, and where rank 0 writes what it has
found: for each place and division how many tensors were loaded, or what went wrong. Every tensor is
gathered and held to what ftckpt's own view of the checkpoint reads, which the tests of each format
hold to that format's truth.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ftckpt import open_checkpoint
from ftckpt.torch import Reader

dcp: Any = checkpoint

_FILL = 77


def empty(shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
    """Return a tensor that holds nothing that a checkpoint has."""
    made = torch.empty(shape, dtype=kind)
    made.view(-1).view(torch.uint8).fill_(_FILL if kind is not torch.bool else 1)
    return made


def placed(shape: tuple[int, ...], mesh: DeviceMesh, way: str) -> list[Any] | None:
    """Return how a tensor is divided over a mesh; None where it is whole on every rank."""
    if way == "whole" or not shape or mesh.size() == 1:
        return None
    if way == "rows":
        return [Shard(0)]
    if way == "columns":
        return [Shard(len(shape) - 1)]
    return [Shard(0), Shard(1) if len(shape) > 1 else Replicate()]  # rows and columns of a grid


def target(row: Any, mesh: DeviceMesh, way: str) -> torch.Tensor:
    """Return a tensor of the job's, to be loaded."""
    kind = getattr(torch, row.dtype)
    division = placed(row.shape, mesh, way)
    if division is None:
        return empty(row.shape, kind)
    local, _ = compute_local_shape_and_global_offset(row.shape, mesh, division)
    whole = torch.Size(row.shape)
    strides = torch.empty(whole, device="meta").stride()
    return DTensor.from_local(
        empty(tuple(local), kind), mesh, division, run_check=False, shape=whole, stride=strides
    )


def differs(got: torch.Tensor, want: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Say whether this rank's part of a tensor is not that of the truth."""
    if isinstance(got, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(want.shape, mesh, got.placements)
        want = want[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        got = got.to_local()
    if got.shape != want.shape or got.dtype != want.dtype:
        return True
    got, want = got.contiguous().view(-1), want.contiguous().view(-1)
    return bool(got.numel()) and not torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def load(place: str, flags: dict[str, Any], mesh: DeviceMesh, way: str) -> tuple[str, bool]:
    """Load one checkpoint; return the number of its tensors, or what is wrong.

    Also returns whether this rank has opened it.
    """
    reader = Reader(place, **flags)
    metadata = reader.read_metadata()
    table, _ = reader._known()
    rows = {row.listed: row for row in table.rows if row.listed in metadata.state_dict_metadata}
    state: dict[str, Any] = {name: target(row, mesh, way) for name, row in rows.items()}
    # A dotted name is one key here: nothing is nested, so nothing is flattened.
    dcp.load(state, storage_reader=reader)
    truth = open_checkpoint(place, bases=flags.get("bases", ()))
    wrong = []
    for name, row in rows.items():
        key = row.key if row.key in truth.tensors else truth.aliases[row.key]
        if differs(state[name], truth[key].torch(), mesh):
            wrong.append(name)
    report = reader.report.evidence
    checked = report.crc32 + report.manifest + report.elsewhere + report.none
    moved = sum(t.numel() * t.element_size() for t in map(_local, state.values()))
    assert not moved or checked or reader.report.verified, (place, report)
    said = f"{len(wrong)} wrong: {wrong[0]}" if wrong else str(len(rows))
    return said, reader._state is not None


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def main(asked: str, answer: str) -> None:
    """Load all, and write what was found on all ranks."""
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2)) if world % 2 == 0 and world > 2 else None
    found: dict[str, dict[str, str]] = {}
    opened: dict[str, int] = {}
    for one in json.loads(Path(asked).read_text()):
        for way in one["ways"]:
            mesh = grid if way == "grid" else line
            if mesh is None or (world == 1 and way != "whole"):
                continue
            try:
                said, own = load(one["place"], one.get("flags", {}), mesh, way)
            except BaseException as error:
                said, own = f"{type(error).__name__}: {error}", False
            all_said: list[Any] = [None] * world
            dist.all_gather_object(all_said, (said, own))
            opened[one["place"]] = sum(mine for _, mine in all_said)
            all_said = [words for words, _ in all_said]
            same = all_said[0] if len(set(all_said)) == 1 else str(all_said)
            found.setdefault(one["place"], {})[way] = same
    if dist.get_rank() == 0:
        Path(answer).write_text(json.dumps({"found": found, "opened": opened}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
