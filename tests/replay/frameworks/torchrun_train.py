"""DDP as `torchrun` starts it, with one file a rank by `torch.save`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import distributed
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from tests.replay.frameworks import parts


def main() -> None:
    given = parts.arguments()
    drop = given.drop
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    file = given.dir / f"state-{rank}.pt"
    parts.seed(rank)
    net = parts.Net()
    torch.manual_seed(17 + rank)
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
    averaged = AveragedModel(net)
    done = position = 0
    resumed = file.exists()
    if resumed:
        state = torch.load(file, weights_only=False)
        net.load_state_dict(parts.fresh(state["model"], drop))
        if drop != "optimizer":
            optimizer.load_state_dict(state["optimizer"])
        parts.reset_schedule(state["scheduler"], drop)
        scheduler.load_state_dict(state["scheduler"])
        if drop != "ema":
            averaged.load_state_dict(state["ema"])
        done = position = state["step"]
    if drop == "step" and resumed:
        done += 1
    if drop == "cursor" and resumed:
        position = 0
    loader = DataLoader(parts.Samples(), parts.BATCH, sampler=parts.Cursor(position, rank))
    batches = iter(loader)  # draws a seed from the global generator
    if resumed:
        parts.set_generators(state["rng"], drop)
    early: Any = None
    for batch in batches:
        done += 1
        loss = model(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        averaged.update_parameters(net)
        now = {
            "step": done, "model": net.state_dict(), "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(), "ema": averaged.state_dict(),
            "rng": parts.generators(),
        }  # fmt: skip
        if done == given.save_at - parts.STALE.get(drop, 0):
            early = copy.deepcopy(now)
        if done == given.save_at:
            if drop == "torn" and early:
                now["optimizer"] = early["optimizer"]
            elif drop in parts.STALE and early:
                now = early
            given.dir.mkdir(parents=True, exist_ok=True)
            torch.save(now, file)
            distributed.barrier()
        if done >= given.steps:
            break
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
