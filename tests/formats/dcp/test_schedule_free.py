"""Schedule-free AdamW, saved by three ranks: resharded, it trains on as the job that saved it did.

The sample and its losses are those of schedulefree 1.4. Its rule is written out here, so that the
losses are compared on machines without that package too.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

import ftckpt as api
from ftckpt import open_checkpoint
from ftckpt.errors import ExitCode
from ftckpt.inspection.resume import Presence, resume_check
from tests.builders.jobs import run_job
from tests.formats.dcp.writing import DATA

SAVED = DATA / "schedulefree" / "step-3"
LOSSES = [float.fromhex(x) for x in json.loads((DATA / "schedulefree/losses.json").read_text())]
SETTINGS = ("lr", "betas", "eps", "k", "warmup_steps", "train_mode", "weight_sum", "lr_max",
            "weight_lr_power", "r", "weight_decay")  # fmt: skip


def loaded_by_torch(place: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the model, the states by parameter, and the settings of the group, from zeros."""
    shapes = {"weight": (4, 5), "bias": (4,)}
    empty = {name: torch.zeros(shape) for name, shape in shapes.items()}
    states = {
        name: {leaf: torch.zeros(shape) for leaf in ("z", "exp_avg_sq")}
        for name, shape in shapes.items()
    }
    groups: list[dict[str, Any]] = [dict.fromkeys(SETTINGS) | {"params": list(shapes)}]
    state = {"model": empty, "optimizer": {"state": states, "param_groups": groups}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it works without process groups
        load(state, checkpoint_id=place, no_dist=True)
    return empty, states, groups[0]


def trained_on(place: Path, steps: int) -> list[float]:
    """Train by the rule of schedulefree 1.4 from what torch loads; return the losses."""
    model, states, group = loaded_by_torch(place)
    beta1, beta2 = group["betas"]
    assert group["train_mode"] is False  # so that the weights are the average, x
    for name, x in model.items():
        x.lerp_(states[name]["z"], 1 - beta1).requires_grad_()
    data, losses = torch.linspace(-1, 1, 20).reshape(4, 5), []
    for k in range(group["k"], group["k"] + steps):
        loss = torch.nn.functional.linear(data, model["weight"], model["bias"]).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        lr = group["lr"] * min(1.0, (k + 1) / group["warmup_steps"])
        group["lr_max"] = max(lr, group["lr_max"])
        weight = (k + 1) ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
        group["weight_sum"] += weight
        part = weight / group["weight_sum"]
        with torch.no_grad():
            for name, y in model.items():
                z, squares = states[name]["z"], states[name]["exp_avg_sq"]
                squares.mul_(beta2).addcmul_(y.grad, y.grad, value=1 - beta2)
                move = y.grad / ((squares / (1 - beta2 ** (k + 1))).sqrt() + group["eps"])
                y.lerp_(z, part).add_(move, alpha=lr * (beta1 * (1 - part) - 1))
                z.sub_(move, alpha=lr)
                y.grad = None
    return losses


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_losses_of_the_uninterrupted_run_follow(ranks: int, tmp_path: Path) -> None:
    api.reshard(str(SAVED), str(tmp_path / "out"), dp=ranks)
    assert trained_on(tmp_path / "out", 3) == pytest.approx(LOSSES, rel=1e-6)
    rows = {row.key: row for row in resume_check(open_checkpoint(str(tmp_path / "out")))}
    assert rows["moments"].presence is Presence.PRESENT
    assert api.verify(str(tmp_path / "out"), level="values").code is ExitCode.OK


def test_schedulefree_itself_trains_on_unless_it_is_set_to_training_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{Path(schedulefree.__file__).parents[1]}")
    api.reshard(str(SAVED), str(tmp_path / "out"), dp=2)
    program = Path(__file__).with_name("schedule_free_training.py")
    for place, ranks, order in (
        (tmp_path / "out", 2, "late"),
        (tmp_path / "out", 2, "early"),
        (SAVED, 3, "early"),  # what nobody resharded loses as much
    ):
        said = run_job(ranks, program, place, order)[0].splitlines()[-1]
        losses = [float.fromhex(word) for word in said.split()[1:]]
        followed = losses == pytest.approx(LOSSES, rel=1e-6)
        assert followed == (order == "late"), (place, losses)
