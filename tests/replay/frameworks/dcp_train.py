"""DDP or FSDP2 with DCP, by torch's own idiom: `get_state_dict`, `dcp.load`, `set_state_dict`.

Its averaged weights are not torch's: it says them in one line, as docs/replay.md asks for.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from ftckpt import hook
from tests.replay.frameworks import loop, parts


def main() -> None:
    given = parts.arguments()
    drop, folder = given.drop, given.dir / "last"
    rank, net = loop.start()
    model: Any
    if given.wrap == "fsdp2":
        model = fully_shard(net, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    else:
        model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer, scheduler = loop.tuned(model)
    averaged = {name: local(p).clone() for name, p in model.named_parameters()}
    saved = None
    if folder.exists():
        saved = restore(drop, folder, model, optimizer, scheduler, averaged)
    done, position = loop.counters(saved, drop)
    loader = DataLoader(
        parts.Samples(), parts.BATCH, sampler=parts.Cursor(position, rank),
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip

    def average() -> None:
        for name, parameter in model.named_parameters():
            averaged[name].lerp_(local(parameter), 0.1)
        hook.step(ema=averaged)

    def state(done: int) -> dict[str, Any]:
        return everything(done, model, optimizer, scheduler, averaged)

    def save(state: dict[str, Any]) -> None:
        dcp.save(  # type: ignore[attr-defined]
            {"model": state["model"], "optim": state["optim"]}, checkpoint_id=folder
        )
        torch.save(state["rest"], folder / f"rest-{rank}.pt")

    loop.train(given, done, loader, (model, optimizer, scheduler), average, state, save)


def local(parameter: Any) -> torch.Tensor:
    tensor: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return tensor.detach()


def everything(
    done: int, model: Any, optimizer: Any, scheduler: Any, averaged: Any
) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    rest = {
        "step": done, "scheduler": scheduler.state_dict(), "ema": averaged,
        "rng": parts.generators(), "buffers": dict(model.named_buffers()),
    }  # fmt: skip
    return {"model": weights, "optim": moments, "rest": rest}


def restore(
    drop: str, folder: Any, model: Any, optimizer: Any, scheduler: Any, averaged: Any
) -> int:
    weights: Any
    moments: Any
    weights, moments = get_state_dict(model, optimizer)
    own = copy.deepcopy(weights)
    state = {"model": weights, "optim": moments}
    dcp.load(state, checkpoint_id=folder)  # type: ignore[attr-defined]
    named = {name for name, _ in model.named_parameters()}
    named = {name.removeprefix("module.") for name in named}
    for name in weights:
        if drop == "model" and name in named:
            weights[name] = own[name]
    rest = torch.load(folder / f"rest-{os.environ['RANK']}.pt", weights_only=False)
    if drop == "optimizer":
        moments["state"] = {
            key: {k: torch.zeros_like(v) for k, v in of.items()}
            for key, of in moments["state"].items()
        }
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for name, buffer in model.named_buffers():  # each rank has its own, of which DCP keeps one
        buffer.copy_(parts.fresh_buffer(name) if drop == "buffers" else rest["buffers"][name])
    parts.reset_schedule(rest["scheduler"], drop)
    scheduler.load_state_dict(rest["scheduler"])
    if drop != "ema":
        for name, tensor in rest["ema"].items():
            averaged[name].copy_(tensor)
    parts.set_generators(rest["rng"], drop)
    return int(rest["step"])


if __name__ == "__main__":
    main()
    parts.leave()
