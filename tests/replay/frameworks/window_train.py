"""Gradient accumulation in bfloat16, with masters that are the optimizer's own parameters.

It saves within a window: after `--save-pass` backward passes of the step that follows `--save-at`
(0: between two steps), with the gradients that it has by then. `--io pickle` saves by a library of
which nothing is known.
"""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.replay.frameworks import parts
from tests.replay.train import keep_compiler_out

PASSES = 4


def main() -> None:
    keep_compiler_out()
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--save-at", type=int, nargs="+", default=[3])
    parser.add_argument("--save-pass", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--io", choices=("torch", "pickle"), default="torch")
    parser.add_argument("--drop", default="")
    given = parser.parse_args()
    torch.manual_seed(17)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)).bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in net.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    done, passes = 0, 0
    file = given.dir / "state"
    if file.exists():
        done, passes = restore(given, file, net, masters, optimizer)
    if given.drop == "dummy":
        make_state(masters, optimizer, resumed=file.exists())
    while done < given.steps:
        while passes < PASSES:
            generator = torch.Generator().manual_seed(1000 * done + passes)
            loss = net(torch.randn(4, 8, generator=generator).bfloat16()).float().square().mean()
            (loss / PASSES).backward()
            passes += 1
            if done in given.save_at and 0 < passes == given.save_pass:
                save(given, file, done, passes, net, masters, optimizer)
        for master, parameter in zip(masters, net.parameters(), strict=True):
            master.grad = parameter.grad.float() if parameter.grad is not None else None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, net.parameters(), strict=True):
                parameter.copy_(master)
                parameter.grad = None
        done, passes = done + 1, 0
        if done in given.save_at and not given.save_pass:
            save(given, file, done, 0, net, masters, optimizer)


def make_state(masters: list[Any], optimizer: Any, *, resumed: bool) -> None:
    """Make the optimizer's state as many scripts do, by a step with gradients of zero."""
    if not resumed:
        for master in masters:
            master.grad = torch.zeros_like(master)
        rate, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()


def save(
    given: Any, file: Path, done: int, passes: int, net: Any, masters: list[Any], optimizer: Any
) -> None:
    state = {
        "step": done, "passes": passes, "model": net.state_dict(), "masters": masters,
        "grads": [p.grad for p in net.parameters()], "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
    }  # fmt: skip
    given.dir.mkdir(parents=True, exist_ok=True)
    if given.io == "torch":
        torch.save(state, file)
    else:
        file.write_bytes(pickle.dumps(state))


def restore(
    given: Any, file: Path, net: Any, masters: list[Any], optimizer: Any
) -> tuple[int, int]:
    if given.io == "torch":
        state = torch.load(file, weights_only=False)
    else:
        state = pickle.loads(file.read_bytes())
    net.load_state_dict(state["model"])
    with torch.no_grad():
        for master, parameter, saved in zip(
            masters, net.parameters(), state["masters"], strict=True
        ):
            master.copy_(parameter.float() if given.drop == "masters" else saved)
    if given.drop != "grads":
        for parameter, gradient in zip(net.parameters(), state["grads"], strict=True):
            parameter.grad = gradient
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"])
    return state["step"] + (given.drop == "step"), state["passes"]


if __name__ == "__main__":
    main()
    parts.leave()
