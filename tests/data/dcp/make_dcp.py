"""Write the distributed checkpoints in this directory: torch's own save, on four gloo ranks.

Run it from the repository root to write them anew: `python tests/data/dcp/make_dcp.py`. The truth
is gathered from live memory before the save, never read back.

- `fsdp2/step-3`, `fsdp2/step-4`: FSDP2 over 4 ranks with AdamW, two saves of one run; `gain` has 3
  rows for 4 ranks, so that the last rank's shard is empty.
- `hsdp`: 2 replicas of 2 shards.
- `tp`: tensor parallel by 2 and FSDP2 by 2: chunks are not in the order of ranks.
- `actors`: an actor with a flattened optimizer and a critic with a nested one, below `trainer`,
  2 ranks.
- `ranklocal`: a save without collectives, 2 ranks: a metadata file each.
- `schedulefree`: FSDP2 over 3 ranks with schedule-free AdamW (schedulefree 1.4), saved after
  `optimizer.eval()` as its page asks; `losses.json` has the three losses of the same job after it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import spawn

HERE = Path(__file__).parent


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y * self.gain.sum()


def gathered(tree: Any, path: str, out: dict[str, torch.Tensor]) -> None:
    if isinstance(tree, dict):
        for key, value in tree.items():
            gathered(value, f"{path}.{key}" if path else str(key), out)
    elif isinstance(tree, DTensor):
        out[path] = tree.full_tensor().clone().contiguous()
    elif isinstance(tree, torch.Tensor):
        out[path] = tree.detach().clone().contiguous()


def save(where: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int,
         **how: Any) -> None:  # fmt: skip
    state: dict[str, Any] = {"train_state": {"step": step, "tokens": step * 1000}}
    if optimizer is None:
        state["model"] = model.state_dict()
    else:
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
    truth: dict[str, torch.Tensor] = {}
    gathered(state, "", truth)
    if dist.get_rank() == 0:
        where.parent.mkdir(parents=True, exist_ok=True)
        save_file(truth, where.with_name(where.name + ".safetensors"))
    dist.barrier()
    save_with_torch(state, storage_writer=FileSystemWriter(where), **how)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    torch.manual_seed(100 + step)
    data = torch.randn(4, 6)
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def fsdp2(out: Path, mesh: DeviceMesh) -> None:
    torch.manual_seed(1)
    model = Net()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(1, 5):
        train(model, optimizer, step)
        if step >= 3:
            save(out / f"step-{step}", model, optimizer, step)


def hsdp(out: Path, mesh: DeviceMesh) -> None:
    torch.manual_seed(2)
    model = Net()
    fully_shard(model, mesh=mesh)
    save(out / "step-3", model, None, 3)


def tp(out: Path, mesh: DeviceMesh) -> None:
    torch.manual_seed(3)
    model = Net()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    save(out / "step-3", model, None, 3)


def ranklocal(out: Path, mesh: DeviceMesh) -> None:
    torch.manual_seed(4)
    model = Net()
    fully_shard(model, mesh=mesh)
    save(out / "step-3", model, None, 3, use_collectives=False)


def actors(out: Path, mesh: DeviceMesh) -> None:
    torch.manual_seed(5)
    state: dict[str, Any] = {"step": 3}
    for name, width, flat in (("actor", 4, True), ("critic", 1, False)):
        model = nn.Linear(6, width)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        for step in range(1, 4):
            train(model, optimizer, step)
        how = StateDictOptions(flatten_optimizer_state_dict=flat)
        weights, moments = get_state_dict(model, optimizer, options=how)
        state[name] = {"model": weights, "optim": moments}
    truth: dict[str, torch.Tensor] = {}
    gathered({"trainer": state}, "", truth)
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        save_file(truth, out / "step-3.safetensors")
    dist.barrier()
    save_with_torch({"trainer": state}, storage_writer=FileSystemWriter(out / "step-3"))


def schedulefree(out: Path, mesh: DeviceMesh) -> None:
    from schedulefree import AdamWScheduleFree

    torch.manual_seed(6)
    model = nn.Linear(5, 4)
    fully_shard(model, mesh=mesh)
    optimizer = AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=2)
    optimizer.train()
    data = torch.linspace(-1, 1, 20).reshape(4, 5)

    def step() -> float:
        loss: torch.Tensor = model(data).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for _ in range(3):
        step()
    optimizer.eval()
    save(out / "step-3", model, optimizer, 3)
    optimizer.train()
    losses = [step().hex() for _ in range(3)]
    if dist.get_rank() == 0:
        (out / "losses.json").write_text(json.dumps(losses) + "\n")


KINDS: dict[str, tuple[Callable[[Path, DeviceMesh], None], tuple[int, ...], tuple[str, ...]]] = {
    "fsdp2": (fsdp2, (4,), ("dp",)),
    "hsdp": (hsdp, (2, 2), ("replicate", "shard")),
    "tp": (tp, (2, 2), ("dp", "tp")),
    "actors": (actors, (2,), ("dp",)),
    "ranklocal": (ranklocal, (2,), ("dp",)),
    "schedulefree": (schedulefree, (3,), ("dp",)),
}


def rank_main(rank: int, kind: str, rendezvous: str, out: str) -> None:
    write, sizes, names = KINDS[kind]
    world = 1
    for size in sizes:
        world *= size
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    write(Path(out), init_device_mesh("cpu", sizes, mesh_dim_names=names))
    dist.barrier()
    dist.destroy_process_group()


def main(kinds: list[str]) -> None:
    for kind in kinds or list(KINDS):
        sizes = KINDS[kind][1]
        world = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
        shutil.rmtree(HERE / kind, ignore_errors=True)
        with tempfile.TemporaryDirectory() as temporary:
            arguments = (kind, f"{temporary}/rendezvous", str(HERE / kind))
            spawn(rank_main, arguments, nprocs=world)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main(sys.argv[1:])
