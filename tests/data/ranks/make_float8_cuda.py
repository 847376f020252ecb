"""Make the sample of torchao's float8 training on a GPU, in the same form as `make_coded.py`.

    python make_float8_cuda.py

with torch 2.11, torchao 0.18, NCCL and one GPU (an H200). FSDP2 gathers the weights in float8, with
scales that are computed once a step for all of them; three steps are trained.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

HERE = Path(__file__).parent / "coded" / "float8_cuda"


def main() -> None:
    """Train, and save in both forms with the truth from live memory."""
    from torchao.float8 import (  # type: ignore[import-not-found]
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 64), nn.Linear(64, 16)
    ).cuda()
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(
        net, config=config, module_filter_fn=lambda module, name: name in ("0", "2")
    )
    for one in (net[0], net[2], net):
        fully_shard(one)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    x = torch.randn(64, 64, device="cuda")
    for _ in range(3):
        net(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(net)
    both: Any = get_state_dict(net, optimizer)
    model, states = both
    truth: dict[str, torch.Tensor] = {}
    for name, value in model.items():
        local = _local(value)
        if hasattr(local, "_tensor"):
            truth[f"{name}._tensor"] = _held(local._tensor)
        else:
            truth[name] = _held(local)
    for name, state in states["state"].items():
        truth |= {f"{name}/{leaf}": _held(_local(value)) for leaf, value in state.items()}
    save_file(truth, HERE / "truth.safetensors")
    whole = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(whole, HERE / "rank_0_of_1.pt")
    state_dict_saver.save(
        {"model": model, "optimizer": states}, checkpoint_id=str(HERE / "dcp"), no_dist=False
    )
    dist.destroy_process_group()


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _held(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone().contiguous()


if __name__ == "__main__":
    main()
