"""What a checkpoint says against itself: saves of torch, each wrong in one way."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftckpt import open_checkpoint
from ftckpt.checkpoint import Checkpoint
from ftckpt.comparison import Field
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.formats.state.fields import state_contents, state_fields
from ftckpt.replay.audit import ENVIRONMENT, Remark, RemarkWeight, audit

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
    assert (found.topic, found.weight) == (topic, RemarkWeight.CONTRADICTION)
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
    assert (found.topic, found.weight) == (topic, RemarkWeight.RISK)
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
    assert {(r.topic, r.weight) for r in found} == {("stale", RemarkWeight.CONTRADICTION)}
    assert [r.message.split(" are ")[0] for r in found] == [
        "all 2 tensors of model", "all 6 tensors of optimizer",
    ]  # fmt: skip


def test_an_environment_that_lets_a_training_drift(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path / "now.pt", state())
    found = audit(checkpoint, environment={"NVIDIA_TF32_OVERRIDE": "1"}).remarks
    assert {r.topic for r in found} == {"environment"}
    assert [r.message.split(" is ")[0] for r in found] == [*ENVIRONMENT, "NVIDIA_TF32_OVERRIDE"]


def presence(file: Path, content: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return what is said of each component of a save: present, absent or cannot tell, and why."""
    now = saved(file, content)
    items = audit(now, contents=state_contents).resume
    return {item.key: (item.presence.value, item.reason) for item in items}


def test_what_names_do_not_say_the_content_shows(tmp_path: Path) -> None:
    whole = state()
    found = presence(tmp_path / "now.pt", {
        "model": whole["model"], "optimizer": whole["optimizer"], "sch": whole["scheduler"],
        "py": random.getstate(), "np": np.random.get_state(), "torch": torch.get_rng_state(),
        "cu": [torch.zeros(16, dtype=torch.uint8)], "sca": whole["scaler"],
        "it": {"_iterator_finished": False, "_sampler_iter_yielded": 3},
    })  # fmt: skip
    shown = {key: said.partition(" holds it")[0] for key, (is_, said) in found.items()
             if is_ == "present" and "as its content shows" in said}  # fmt: skip
    assert shown == {
        "scheduler": "sch", "rng-python": "py", "rng-numpy": "np", "rng-torch": "extra:torch:torch",
        "rng-cuda": "extra:cu:0", "data": "it", "scaler": "sca",
    }  # fmt: skip


def test_what_is_not_understood_is_never_called_absent(tmp_path: Path) -> None:
    whole = {"model": state()["model"], "optimizer": state()["optimizer"]}
    assert presence(tmp_path / "none.pt", whole)["rng-python"][0] == "absent"
    found = presence(tmp_path / "odd.pt", whole | {"odd": (1, 2), "n": 4, "best": 0.5, "x": "a"})
    why = "nothing shows it, and what is not understood may hold it: odd"
    assert found["rng-python"] == found["scheduler"] == ("cannot tell", why)
    assert found["data"] == ("cannot tell", f"{why}, n")
    # A number is no generator's state, and a text is nothing's.
    plain = presence(tmp_path / "plain.pt", whole | {"n": 4, "best": 0.5, "x": "a"})
    assert [plain[key][0] for key in ("rng-python", "scheduler", "data")] == [
        "absent", "absent", "cannot tell",
    ]  # fmt: skip
    # What cannot be read may hold anything.
    now = saved(tmp_path / "now.pt", whole)
    damage = CorruptError("the record is damaged", tensor="blob")
    items = {item.key: item for item in audit(now, contents=lambda *_: [damage]).resume}
    assert (items["rng-python"].presence.value, items["rng-python"].where) == (
        "cannot tell", ("blob",),
    )  # fmt: skip


def test_a_tensor_under_the_recommended_name_is_what_it_is(tmp_path: Path) -> None:
    ranks = {f"rank_{rank}": torch.get_rng_state() for rank in range(2)}
    found = presence(tmp_path / "now.pt", state() | {"rng": ranks})
    assert found["rng-torch"][0] == "present"
    assert [found[key][0] for key in ("rng-python", "rng-numpy", "rng-cuda")] == ["absent"] * 3
