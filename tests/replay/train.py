"""A small real training: data loader, dropout, BatchNorm, schedule, scaler, averaged weights.

It saves after step --save-at and resumes from what it finds. --drop leaves one component out of
the restore, or does another thing that goes wrong in practice. It knows nothing of ftckpt.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BATCH, SAMPLES = 4, 4096


def keep_compiler_out() -> None:
    """Let the first step of an optimizer import no compiler: it takes as long as torch itself."""
    compiler: Any = types.ModuleType("torch._dynamo")
    compiler.disable = lambda step, *_, **__: step
    compiler.graph_break = lambda: None
    compiler.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
    sys.modules.setdefault("torch._dynamo", compiler)


class Samples(Dataset[Any]):
    """Each sample is its number; the features follow from it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.sin(torch.arange(8.0) * (index + 1)), index % 3


class Cursor:
    """Draws samples in order from a position, shifted by what NumPy draws."""

    def __init__(self, batches: int) -> None:
        self.at = BATCH * batches

    def __iter__(self) -> Iterator[int]:
        while True:
            yield (self.at + int(np.random.randint(BATCH))) % SAMPLES
            self.at += 1


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )


def main() -> None:
    if os.environ.get("WORLD_SIZE", "1") == "1":  # DistributedDataParallel asks it
        keep_compiler_out()
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, default=Path("ckpt"))
    parser.add_argument("--save-at", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--drop", default="")
    given = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    # What a restart that forgets to restore begins with; never what a stopped run had.
    seed = 17 + rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(17)
    net = network()
    torch.manual_seed(seed)
    model: nn.Module = nn.parallel.DistributedDataParallel(net) if ranks > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    averaged = torch.optim.swa_utils.AveragedModel(net)
    done = 0
    file = given.dir / f"state-{rank}.pt"
    if file.exists():
        done = restore(given.drop, file, net, optimizer, scheduler, scaler, averaged)
    if given.drop == "unseeded" and done:
        torch.manual_seed(time.time_ns())
    sampler = Cursor(0 if given.drop == "cursor" and done else done)
    loader = DataLoader(
        Samples(), BATCH, sampler=sampler, num_workers=given.workers, drop_last=True,
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    for features, labels in loader:
        done += 1
        loss = step(given.drop, done, model, features, labels, optimizer, scaler)
        scheduler.step()
        averaged.update_parameters(net)
        if given.drop == "print":
            print(f"step {done} loss {loss:.4f}", flush=True)
        early = done == given.save_at - 1 and given.drop in ("stale", "torn")
        if done == given.save_at or early:
            given.dir.mkdir(parents=True, exist_ok=True)
            state = everything(done, net, optimizer, scheduler, scaler, averaged)
            if file.exists():
                before = torch.load(file, weights_only=False)
                # The async copy of the step before, whole or of the optimizer alone.
                state = before if given.drop == "stale" else state | {
                    "optimizer": before["optimizer"]
                }  # fmt: skip
            torch.save(state, file)
            if ranks > 1:
                torch.distributed.barrier()
        if done >= given.steps:
            break


def step(
    drop: str, done: int, model: nn.Module, features: Any, labels: Any, optimizer: Any, scaler: Any
) -> float:
    features = features + 1e-3 * random.random()
    loss = nn.functional.cross_entropy(model(features), labels)
    if drop == "noise":
        loss = loss + sum_in_order_of_threads([1e8, 1.25, -1e8, 1e-3, 0.75, 3.5])
    if drop == "nan" and done == 6:
        loss = loss * float("nan")
    if drop == "crash" and done == 6:
        sys.exit("out of memory")
    if drop == "hang" and done == 6:
        time.sleep(3600)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return float(loss.detach())


def sum_in_order_of_threads(parts: list[float]) -> float:
    """Add float32 numbers as threads come to it, as atomic additions do."""
    total, lock = np.zeros((), np.float32), threading.Lock()

    def add(part: float) -> None:
        time.sleep(os.urandom(1)[0] * 1e-5)
        with lock:
            total[...] += np.float32(part)

    threads = [threading.Thread(target=add, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return float(total)


def everything(
    done: int, net: Any, optimizer: Any, scheduler: Any, scaler: Any, averaged: Any
) -> dict[str, Any]:
    return {
        "step": done,
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "ema": averaged.state_dict(),
        "rng": {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        },
    }


def restore(
    drop: str, file: Path, net: Any, optimizer: Any, scheduler: Any, scaler: Any, averaged: Any
) -> int:
    state = torch.load(file, weights_only=False)
    weights = {name for name, _ in net.named_parameters()}
    left_out = {"model": weights, "buffers": state["model"].keys() - weights}.get(drop, set())
    kept = {name: tensor for name, tensor in state["model"].items() if name not in left_out}
    net.load_state_dict(kept, strict=False)
    for name, thing in (("optimizer", optimizer), ("scheduler", scheduler), ("scaler", scaler),
                        ("ema", averaged)):  # fmt: skip
        if drop != name:
            thing.load_state_dict(state[name])
    if drop != "python":
        random.setstate(state["rng"]["python"])
    if drop != "numpy":
        np.random.set_state(state["rng"]["numpy"])
    if drop != "torch":
        torch.set_rng_state(state["rng"]["torch"])
    if drop == "nudge":  # one bit of one weight
        weight = net[0].weight.data
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
    if drop == "late":  # the schedule was saved before its step
        scheduler.last_epoch -= 1
    if drop == "draw":
        iter(DataLoader(Samples()))  # as a restart that looks at its data first
    return int(state["step"])


if __name__ == "__main__":
    main()
