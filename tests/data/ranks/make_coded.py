"""Make the samples of FSDP2 around torchao's optimizers.

    python make_coded.py

with torch 2.13 and torchao 0.18, gloo on the CPU. For each optimizer `coded/<name>` holds a rank's
`torch.save` of the sharded state (`rank_R_of_W.pt`), in `dcp/` what `dcp.save` writes of
`get_state_dict` in the same job, and `truth.safetensors` from live memory: of each tensor its
shards in the order of ranks, joined where that is exact.

- adamw8bit: two ranks, blocks of 64. `short` is cut into two of other sizes; `mixed` into one in
  codes and one that torchao leaves as plain numbers; `small` is plain.
- adamw4bit, adamwfp8: three ranks; the last one holds nothing of `wide`.
- float8: two ranks, weights of torchao's float8 training, which gathers them in float8. They are
  not trained: that needs a GPU.
- nf4: two ranks, weights in NF4 as QLoRA has them, which nothing trains.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

HERE = Path(__file__).parent / "coded"
# Of each job: ranks, size of blocks, shape of each parameter.
JOBS: dict[str, tuple[str, int, int, dict[str, tuple[int, int]]]] = {
    "adamw8bit": (
        "AdamW8bit", 2, 64,
        {"short": (131, 64), "mixed": (127, 64), "small": (8, 64)},
    ),
    "float8": ("", 2, 0, {}),
    "nf4": ("", 2, 64, {}),
    "adamw4bit": ("AdamW4bit", 3, 128, {"wide": (4, 2048), "small": (2, 64)}),
    "adamwfp8": ("AdamWFp8", 3, 256, {"wide": (4, 2048), "small": (2, 64)}),
}  # fmt: skip


class Net(nn.Module):
    """Matrices, and a mean of what they give."""

    def __init__(self, shapes: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            weight = torch.randn(shape) / 8
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = [x[:, : one.shape[1]] @ one.T for one in self.parameters()]
        return torch.stack([one.float().square().mean() for one in given]).sum()


def in_float8() -> nn.Module:
    """Return a model whose weights torchao's float8 training wraps."""
    from torchao.float8 import (  # type: ignore[import-not-found]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 49))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(net, config=config)  # type: ignore[no-any-return]


def in_nf4(block: int) -> nn.Module:
    """Return a model whose weights are torchao's NF4Tensor."""
    from torchao.quantization import NF4Tensor  # type: ignore[import-not-found]

    net = nn.Sequential(nn.Linear(128, 64, bias=False), nn.Linear(64, 128))
    for layer in (net[0], net[1]):
        assert isinstance(layer, nn.Linear)
        made = NF4Tensor.from_tensor(layer.weight.detach().bfloat16(), block, 16)
        layer.weight = nn.Parameter(made, requires_grad=False)
    return net


def inside(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors inside one rank's shard, by what follows its name."""
    local = value.to_local() if isinstance(value, DTensor) else value
    if type(local) is torch.Tensor:
        return {"": local.detach().clone().contiguous()}
    flatten: Any = type(local)
    names: list[str] = flatten.__tensor_flatten__(local)[0]
    return {f".{name}": getattr(local, name).detach().clone().contiguous() for name in names}


def joined(name: str, shards: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors of all shards, joined if all of them are of one kind."""
    full = [shard for shard in shards if all(part.numel() for part in shard.values())]
    if len({tuple(shard) for shard in full}) > 1:
        return {f"{name}.{n}{part}": t for n, s in enumerate(full) for part, t in s.items()}
    found = {}
    for part in full[0]:
        whole = [shard[part] for shard in full]
        one = part in (".qmap", ".nf4") or not whole[0].dim()
        found[name + part] = whole[0] if one else torch.cat(whole)
    return found


def job(rank: int, kind: str) -> None:
    """Train three steps as one rank of a job, and save."""
    warnings.simplefilter("ignore")
    import torchao.optim  # type: ignore[import-not-found]

    made, world, block, shapes = JOBS[kind]
    out = HERE / kind
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29631"}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(5)
    net = Net(shapes) if made else in_nf4(block) if block else in_float8()
    fully_shard(net, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    state: dict[str, Any] = {"model": net.state_dict(), "step": 3}
    optimizer: Any = None
    if made:
        optimizer = getattr(torchao.optim, made)(net.parameters(), lr=0.01, block_size=block)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(4, 2048)).backward()
            optimizer.step()
        state["optimizer"] = optimizer.state_dict()
    torch.save(state, out / f"rank_{rank}_of_{world}.pt")
    held = {name: inside(value) for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for leaf, value in optimizer.state[parameter].items() if made else ():
            held[f"{name}/{leaf}"] = inside(value)
    torch.save(held, out / f"held_{rank}")
    dist.barrier()
    if rank == 0:
        every = [torch.load(out / f"held_{one}") for one in range(world)]
        truth: dict[str, torch.Tensor] = {}
        for name in held:
            truth |= joined(name, [one[name] for one in every])
        save_file(
            {name: tensor.clone() for name, tensor in truth.items()}, out / "truth.safetensors"
        )
        for one in range(world):
            (out / f"held_{one}").unlink()
    if made:
        weights, states = get_state_dict(net, optimizer)
        state = {"model": weights, "optimizer": states}
    state_dict_saver.save(state, checkpoint_id=out / "dcp")
    dist.destroy_process_group()


def main() -> None:
    """Make all samples, or those that are named."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing is to be compiled
    for kind in sys.argv[1:] or JOBS:
        world = JOBS[kind][1]
        shutil.rmtree(HERE / kind, ignore_errors=True)
        (HERE / kind).mkdir(parents=True)
        start: Any = start_processes  # torch leaves it untyped
        start(job, args=(kind,), nprocs=world, start_method="spawn")


if __name__ == "__main__":
    main()
