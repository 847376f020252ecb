"""What a checkpoint says against itself: saves of torch, each wrong in one way."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt import open_checkpoint
from ftckpt.checkpoint import Checkpoint
from ftckpt.comparison import Field
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.formats.state_fields import state_fields
from ftckpt.replay.audit import ENVIRONMENT, Remark, Weight, audit

STEPS = 4


def state(steps: int = STEPS) -> dict[str, Any]:
    """Return what a training keeps after some steps."""
    torch.manual_seed(1)
    random.seed(1)
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2000)
    for _ in range(steps):
        scaler.scale(net(torch.randn(3, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    return {
        "global_step": steps,
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "args": {"cudnn_benchmark": False, "tf32": False},
        "rng": {"python": random.getstate(), "torch": torch.get_rng_state()},
    }


def saved(file: Path, content: dict[str, Any]) -> Checkpoint:
    torch.save(content, file)
    return open_checkpoint(str(file))


def remarks(
    folder: Path, content: dict[str, Any], following: dict[str, Any] | None = None
) -> list[Remark]:
    """Return what is said of a save, in an environment of which nothing is said."""
    now = saved(folder / "now.pt", content)
    after = None if following is None else saved(folder / "next.pt", following)
    known = dict.fromkeys(ENVIRONMENT, "")
    return list(audit(now, after, known, fields=state_fields(now)).remarks)


def test_nothing_is_said_of_a_save_that_is_right(tmp_path: Path) -> None:
    assert remarks(tmp_path, state(), state(STEPS + 1)) == []


@pytest.mark.parametrize(
    ("wrong", "topic", "said"),
    [
        # Adam's step of the save before, with the weights of this one.
        ({"optimizer": state(STEPS - 1)["optimizer"]}, "optimizer-step",
         "the trainer counts 4 steps and the optimizer 3"),
        ({"scheduler": state(STEPS - 1)["scheduler"]}, "scheduler-step", "off by 1"),
        ({"scaler": state()["scaler"] | {"_growth_tracker": 9}}, "scaler",
         "counts 9 steps without overflow, and the trainer 4 in all"),
        ({"scaler": state()["scaler"] | {"_growth_tracker": 2000}}, "scaler",
         "grows every 2000"),
        ({"scaler": state()["scaler"] | {"scale": 0.0}}, "scaler", "has the scale 0"),
        ({"scaler": {"cur_scale": 8.0, "cur_iter": 4, "last_overflow_iter": 7}}, "scaler",
         "saw an overflow at step 7 and counts 4 in all"),
    ],
)  # fmt: skip
def test_a_contradiction_is_found(
    tmp_path: Path, wrong: dict[str, Any], topic: str, said: str
) -> None:
    [found] = remarks(tmp_path, state() | wrong)
    assert (found.topic, found.weight) == (topic, Weight.CONTRADICTION)
    assert said in found.message


@pytest.mark.parametrize(
    ("wrong", "topic", "said"),
    [
        ({"scaler": {"scale": 64.0, "growth_interval": 2000}}, "scaler", "it begins again"),
        ({"args": {"cudnn_benchmark": True}}, "settings", "by how fast they ran"),
        ({"args": {"deterministic_mode": False}}, "settings", "in any order"),
    ],
)
def test_a_risk_is_found(tmp_path: Path, wrong: dict[str, Any], topic: str, said: str) -> None:
    [found] = remarks(tmp_path, state() | wrong)
    assert (found.topic, found.weight) == (topic, Weight.RISK)
    assert said in found.message


def test_ranks_that_share_a_stream_and_state_that_cannot_be_read(tmp_path: Path) -> None:
    fields: list[Field | FtckptError] = [
        *(Field("rng.python", rank, "", b"same") for rank in (0, 2)),
        Field("rng.python", 1, "", b"other"),
        CorruptError("the record is damaged"),
    ]
    found = audit(saved(tmp_path / "now.pt", state()), fields=fields).remarks
    assert {r.topic: r.message for r in found} == {
        "equal-rng": "2 ranks share one state of rng.python (0, 2): they draw the same",
        "unread": "some of its state cannot be read: the record is damaged",
    }


def test_two_saves_that_are_identical_are_stale(tmp_path: Path) -> None:
    found = remarks(tmp_path, state(), state() | {"global_step": STEPS + 1})
    assert {(r.topic, r.weight) for r in found} == {("stale", Weight.CONTRADICTION)}
    assert [r.message.split(" are ")[0] for r in found] == [
        "all 2 tensors of model", "all 6 tensors of optimizer",
    ]  # fmt: skip


def test_an_environment_that_lets_a_training_drift(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "now.pt", state())
    found = audit(checkpoint, environment={"NVIDIA_TF32_OVERRIDE": "1"}).remarks
    assert {r.topic for r in found} == {"environment"}
    assert [r.message.split(" is ")[0] for r in found] == [*ENVIRONMENT, "NVIDIA_TF32_OVERRIDE"]
