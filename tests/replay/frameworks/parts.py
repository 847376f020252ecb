"""What the trainings of all frameworks share: a network that uses every kind of state, and data.

Each restart may be told to leave one thing out (`--drop`); what that is called is the same in all
programs. A program saves after step `--save-at` and knows nothing of ftckpt.
"""

from __future__ import annotations

import argparse
import atexit
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

BATCH, SAMPLES = 4, 4096
# State that was saved is that of so many steps before.
STALE = {"stale": 1, "stale2": 2, "stale5": 5, "torn": 1}


def leave() -> None:
    """End this process well, without the half second that taking torch apart takes."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class Samples(Dataset[Any]):
    """Each sample is its number; the features follow from it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "features": torch.sin(torch.arange(8.0) * (index + 1)),
            "labels": torch.tensor(index % 3),
        }


class Cursor:
    """Draws samples in order from a position."""

    def __init__(self, batches: int, rank: int = 0) -> None:
        self.at = BATCH * batches + 1000 * rank

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.at % SAMPLES
            self.at += 1


class Net(nn.Module):
    """Has buffers, and draws from all three generators in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
        )

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            features = features + 1e-2 * random.random() + 1e-2 * float(np.random.rand())
        logits = self.layers(features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--save-at", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--drop", default="")
    parser.add_argument("--wrap", choices=("ddp", "fsdp2"), default="ddp")
    return parser.parse_args()


def seed(rank: int = 0) -> None:
    random.seed(17 + rank)
    np.random.seed(17 + rank)
    torch.manual_seed(17)


def generators() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }


def set_generators(state: dict[str, Any], drop: str) -> None:
    if drop != "python":
        random.setstate(state["python"])
    if drop != "numpy":
        np.random.set_state(state["numpy"])
    if drop != "torch":
        torch.set_rng_state(state["torch"])
    if drop == "draw":
        torch.randint(1 << 40, ())


def fresh(state: dict[str, torch.Tensor], drop: str) -> dict[str, torch.Tensor]:
    """Return a model's state with what is dropped as a new model has it."""
    with torch.random.fork_rng():
        torch.manual_seed(99)
        new = Net()
    weights = {name for name, _ in new.named_parameters()}
    out = {}
    for name, tensor in state.items():
        bare = name.removeprefix("module.").removeprefix("net.")
        forget = bare in weights if drop == "model" else drop == "buffers" and bare not in weights
        out[name] = new.state_dict()[bare].clone() if forget else tensor
    return out


def fresh_buffer(name: str) -> torch.Tensor:
    """Return a buffer as a new model has it."""
    with torch.random.fork_rng():
        return dict(Net().named_buffers())[name.removeprefix("module.")]


def reset_schedule(state: dict[str, Any], drop: str) -> None:
    """Change the state of a schedule as a restart that forgets it, or has saved it too early."""
    if drop == "scheduler":
        state |= {"last_epoch": 0, "_step_count": 1}
    elif drop == "late":
        state["last_epoch"] -= 1
