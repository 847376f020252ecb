"""One rank of an FSDP2 job that loads its own file, as verl does, and compares with the truth.

python rank_loading.py FOLDER TRUTH.safetensors
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def module_of(state: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return a module with the parameters and buffers that a state_dict names."""
    root = torch.nn.Module()
    for name, value in state.items():
        owner = root
        *path, leaf = name.split(".")
        for step in path:
            if not hasattr(owner, step):
                owner.add_module(step, torch.nn.Module())
            owner = getattr(owner, step)
        zeros = torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, DTensor):
            owner.register_parameter(leaf, torch.nn.Parameter(zeros))
        else:
            owner.register_buffer(leaf, zeros)
    return root


def main(folder: Path, truth: Path) -> None:
    """Load and compare."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    file = folder / f"model_world_size_{world}_rank_{rank}.pt"
    state = torch.load(file, map_location="cpu", weights_only=False)
    model = module_of(state)
    fully_shard(model, mesh=mesh)
    model.load_state_dict(state)
    whole = load_file(truth)
    for name, value in model.state_dict().items():
        got = value.full_tensor() if isinstance(value, DTensor) else value
        assert got.dtype is whole[name].dtype, name
        assert torch.equal(got, whole[name]), name
    print("equal", len(state))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
