"""One rank of a job that resumes with schedule-free AdamW, and prints the losses of three steps.

`train()` reads the state of every parameter, and `optimizer.state` makes an empty one for each.
torch's `get_state_dict` takes these for a state that is there and makes none, so `load` finds no
tensor to fill: nothing of `z` and `exp_avg_sq` is loaded, without a word, and the losses are
others. So a new optimizer is set to training by its groups alone before `get_state_dict`, and
`train()` is called when all is loaded. `order` is "late", or "early" for the job that loses them.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from schedulefree import AdamWScheduleFree
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main(checkpoint: str, order: str) -> None:
    """Load into a new model and its optimizer, and train on."""
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = torch.nn.Linear(5, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=2)
    if order == "early":
        optimizer.train()
    for group in optimizer.param_groups:
        group["train_mode"] = True
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    load(loaded, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    optimizer.train()
    losses = []
    for _ in range(3):
        loss = model(torch.linspace(-1, 1, 20).reshape(4, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    if dist.get_rank() == 0:
        print("losses", *losses)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
