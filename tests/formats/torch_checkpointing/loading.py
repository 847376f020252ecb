"""A rank of a job that loads saves with torch_checkpointing itself, resharded to its own number.

`python loading.py SAVE TRUTH …`: fails where a tensor is not that of the truth.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist


def states(truth: dict[str, Any], mesh: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model's and an optimizer's state of zeros, cut over the ranks."""
    from torch.distributed.tensor import Shard, distribute_tensor

    def zeros(value: Any) -> Any:
        empty = torch.zeros_like(value)
        return distribute_tensor(empty, mesh, [Shard(0)]) if value.dim() else empty

    model: dict[str, Any] = {}
    moments: dict[str, Any] = {}
    for key, value in truth.items():
        kind, _, name = key.rpartition(":")
        if kind == "optimizer":
            moments.setdefault(name.removesuffix(".step"), {})["step"] = zeros(value)
        elif kind:
            moments.setdefault(name, {})[kind] = zeros(value)
        else:
            model[name] = zeros(value)
    return model, moments


def load(cases: list[tuple[str, str]]) -> None:
    """Load every save as one rank, and compare."""
    world = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    from safetensors.torch import load_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("x",))
    resharder = DefaultResharder()
    config = CheckpointManager.Config.with_sync_save()
    config.items = {name: ItemSpec(resharder=resharder) for name in ("model", "optimizer")}
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    for save, file in cases:
        truth = load_file(file)
        model, moments = states(truth, mesh)
        manager = config.build()
        manager.load(save, {"model": model, "optimizer": {"state": moments}}, strict=True)
        manager.close()
        for key, value in truth.items():
            kind, _, name = key.rpartition(":")
            held = (
                moments[name.removesuffix(".step")]["step"]
                if kind == "optimizer"
                else (moments[name][kind] if kind else model[name])
            )
            found = held.full_tensor() if isinstance(held, DTensor) else held
            assert torch.equal(found, value), (save, key)
    dist.destroy_process_group()


if __name__ == "__main__":
    places = sys.argv[1:]
    load(list(zip(places[::2], places[1::2], strict=True)))
