"""Make the samples: `python make.py` beside an installed torch_checkpointing (0.1.1), on CPU.

    fsdp      3 ranks, uneven shards along the first axis, every item that torchtitan saves
    grid      4 ranks, a mesh of 2 x 2 with shards along both axes and replicas
    fsdp_tp   4 ranks, FSDP2 over tensor parallelism: strided shards of a model that trained
    mixed     2 ranks, the model in safetensors, other items in JSON and as raw bytes

Each has its step, and `truth.safetensors`: every tensor whole, by its key.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing.spawn as mp

HERE = Path(__file__).parent
KINDS = {"fsdp": 3, "grid": 4, "fsdp_tp": 4, "mixed": 2}


def states(kind: str, world: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return a model's and an optimizer's state, and both whole by key."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if kind == "fsdp_tp":
        return trained(world)
    made = torch.Generator().manual_seed(7)
    full = {
        "embed.weight": torch.randn(10, 6, generator=made),
        "layers.0.w": torch.randn(7, 4, generator=made),
        "layers.0.b": torch.randn(5, generator=made).to(torch.bfloat16),
        "norm": torch.randn(6, generator=made),
    }
    if kind == "grid":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_shard", "tp"))
        cuts: dict[str, Any] = {
            "norm": [Shard(0), Replicate()],
            "layers.0.b": [Replicate(), Shard(0)],
        }
        cuts = {name: cuts.get(name, [Shard(0), Shard(1)]) for name in full}
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
        cuts = {name: [Shard(0)] for name in full}
    model: dict[str, Any] = {n: distribute_tensor(t, mesh, cuts[n]) for n, t in full.items()}
    model["scale"] = torch.arange(4.0)
    moments = {n: t.float() * 2 for n, t in full.items()}
    state = {
        n: {"exp_avg": distribute_tensor(t, mesh, cuts[n]), "step": torch.tensor(3.0)}
        for n, t in moments.items()
    }
    truth = {**full, "scale": model["scale"]}
    for name, moment in moments.items():
        truth |= {f"exp_avg:{name}": moment, f"optimizer:{name}.step": torch.tensor(3.0)}
    return model, {"state": state, "param_groups": [{"lr": 1e-3, "params": list(full)}]}, truth


def trained(world: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the states of a small model that trained under FSDP2 over tensor parallelism."""
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("fsdp", "tp"))
    net = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6))
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(2):
        net(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model, state = get_state_dict(net, optimizer)

    def whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    truth = {name: whole(value) for name, value in model.items()}
    moments: Any = state["state"]
    for name, held in moments.items():
        for leaf, value in held.items():
            key = f"optimizer:{name}.step" if leaf == "step" else f"{leaf}:{name}"
            truth[key] = whole(value)
    return model, state, truth


def run(rank: int, world: int, kind: str) -> None:
    """Save one sample as one of its ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": str(rank),
                   "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}  # fmt: skip
    dist.init_process_group("gloo", rank=rank, world_size=world)
    from safetensors.torch import save_file
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.checkpoint_layout import (
        JsonSerialization,
        LayoutInfo,
        RawSerialization,
        SafetensorsSerialization,
    )
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gather(_: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
        found: list[Any] = [None] * world
        dist.all_gather_object(found, data)
        return dict(enumerate(found))

    manages: Any = DefaultMetadataManager
    manages._all_gather_pickled_data = gather  # its own needs a GPU
    model, optimizer, truth = states(kind, world)
    resharder = DefaultResharder()
    items = {"model": ItemSpec(resharder=resharder), "optimizer": ItemSpec(resharder=resharder)}
    payload: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "train_state": {"step": 10, "ntokens": 1000},
    }
    if kind == "fsdp":
        payload["lr_scheduler"] = {"last_epoch": 10}
        payload["dataloader"] = {f"dp_rank_{rank}": b"abc", "world_size": world}
    if kind == "mixed":
        layout = LayoutInfo(
            "rank_{rank}/model.safetensors", SafetensorsSerialization({"who": "me"})
        )
        items["model"] = ItemSpec(resharder=resharder, layout=layout)
        items["train_state"] = ItemSpec(
            layout=LayoutInfo("train_state_{rank}.json", JsonSerialization())
        )
        items["blob"] = ItemSpec(layout=LayoutInfo("blob_{rank}.bin", RawSerialization()))
        payload["blob"] = b"raw bytes"
    config = CheckpointManager.Config.with_sync_save()
    config.items, config.storage_config = items, LocalFileSystemStorageConfig(use_direct_io=False)
    manager = config.build()
    manager.save(str(HERE / kind / "step-10"), payload)
    manager.close()
    if rank == 0:
        save_file({n: t.contiguous() for n, t in truth.items()}, HERE / kind / "truth.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for name in sys.argv[1:] or KINDS:
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
        spawn: Any = mp.spawn
        spawn(run, (KINDS[name], name), nprocs=KINDS[name])
