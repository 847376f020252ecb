"""Write the rank-file fixtures with real torch: `python tests/data/ranks/make_ranks.py`.

Three jobs of four processes, each two steps of AdamW on a tiny model with uneven shapes, saved as
verl saves (one torch.save a rank and part), and `truth.safetensors` gathered from live memory:
- fsdp1: FullyShardedDataParallel, SHARDED_STATE_DICT: ShardedTensor, optimizer keyed by name.
- tp_fsdp2: fully_shard over tensor parallelism: DTensor with _StridedShard, optimizer by index.
- hsdp: fully_shard on a 2 x 2 replicate x shard mesh.
The fixtures in this folder were written by torch 2.13 on CPU with gloo.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import start_processes

WORLD = 4
HERE = Path(__file__).parent


class Net(nn.Module):
    """Uneven rows, a tensor with fewer rows than ranks, a buffer that no rank cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 5)
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y * self.gain.sum()


def full(value: Any) -> torch.Tensor:
    """Gather one tensor from all ranks."""
    if isinstance(value, DTensor):
        whole: torch.Tensor = value.full_tensor().detach().clone()
        return whole
    if hasattr(value, "local_shards"):
        out = torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
        value.gather(dst=0, out=out)
        return torch.empty(0) if out is None else out
    kept: torch.Tensor = value.detach().clone()
    return kept


def job(rank: int, kind: str, out: Path) -> None:
    """Train two steps as one rank of a job and save its files."""
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.manual_seed(11)
    net: Any = Net()
    if kind == "fsdp1":
        net = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        names = ("dp", "tp") if kind == "tp_fsdp2" else ("replicate", "shard")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        if kind == "tp_fsdp2":
            parallelize_module(
                net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            fully_shard(net, mesh=mesh["dp"])
        else:
            fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = torch.Generator().manual_seed(rank)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(4, 6, generator=data)).square().sum().backward()
        optimizer.step()
        schedule.step()
    if kind == "fsdp1":
        FullyShardedDataParallel.set_state_dict_type(
            net,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        )
        moments = FullyShardedDataParallel.optim_state_dict(net, optimizer)
        named = moments["state"]
    else:
        moments = optimizer.state_dict()
        order = [name for name, _ in net.named_parameters()]
        named = {order[i]: state for i, state in moments["state"].items()}
    model = net.state_dict()
    truth = {name: full(value) for name, value in model.items()}
    for name, state in named.items():
        truth |= {f"optim:{name}.{key}": full(value) for key, value in state.items()}
    extra = {
        "lr_scheduler": schedule.state_dict(),
        "rng": {"cpu": torch.get_rng_state(), "random": random.Random(rank).getstate()[1][:3]},
    }
    parts = {"model": model, "optim": moments, "extra_state": extra}
    for part, value in parts.items():
        torch.save(value, out / f"{part}_world_size_{WORLD}_rank_{rank}.pt")
    if rank == 0:
        version = 1 if kind == "fsdp1" else 2
        config = {"FSDP_version": version, "world_size": WORLD}
        (out / "fsdp_config.json").write_text(json.dumps(config))
        save_file({k: v.contiguous() for k, v in truth.items()}, out.parent / "truth.safetensors")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Write all fixtures anew."""
    for kind in sys.argv[1:] or ("fsdp1", "tp_fsdp2", "hsdp"):
        out = HERE / kind / "actor"
        shutil.rmtree(HERE / kind, ignore_errors=True)
        out.mkdir(parents=True)
        start: Any = start_processes  # torch leaves it untyped
        start(job, args=(kind, out), nprocs=WORLD)


if __name__ == "__main__":
    main()
