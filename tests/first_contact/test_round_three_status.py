"""Saves that no list of trainers named: what status says, other archives, pointers of any name.

k-diffusion's pointer, PhysicsNeMo's archives, the two models of the Descript Audio Codec,
Implicitron's pairs, diffusion_policy's `latest.ckpt`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.json_run import ftckpt_json


def save(path: Path, fill: float = 1.0, **state: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": {"layer.weight": torch.full((4, 4), fill)}, **state}, path)


def code(*words: str) -> int:
    return int(ftckpt_json(*words)["result"]["code"])


# ---------------------------------------------------------------------------------------------
# A pointer under any name


def reasons(root: Path) -> dict[str, str]:
    """Return what gc says of each entry, by its name."""
    plan = ftckpt_json("gc", str(root), "--keep-last", "2")
    return {one["name"]: json.dumps(one) for one in plan["plan"]["decisions"]}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model_state.json", '{"latest_checkpoint": "model_00020000.pth"}'),
        ("run.json", '{"a": {"b": ["/elsewhere/run/model_00020000.pth"]}}'),
        ("state.yaml", "epoch: 3\nbest: ./model_00020000.pth\n"),
        ("checkpoint", 'model_checkpoint_path: "model_00020000.pth"\n'),
        ("current.txt", "model_00020000.pth\n"),
    ],
)
def test_gc_keeps_what_a_small_text_names(tmp_path: Path, name: str, text: str) -> None:
    for step in (10000, 20000, 30000, 40000):
        save(tmp_path / f"model_{step:08}.pth", step, step=step)
    (tmp_path / name).write_text(text)
    said = reasons(tmp_path)
    assert f"{name} names it" in said["model_00020000.pth"]
    assert "expired" in said["model_00010000.pth"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model_00020000.json", '{"file": "model_00020000.pth"}'),
        ("losses.json", '{"model_00020000.pth": 0.5}'),
        ("log.csv", "model_00020000.pth\n"),
        ("note.txt", "model_00020000.pth was bad, do not use it\n"),
        ("all.json", json.dumps([f"model_{step:08}.pth" for step in range(10000, 110000, 10000)])),
    ],
)
def test_a_text_about_saves_is_no_pointer(tmp_path: Path, name: str, text: str) -> None:
    for step in range(10000, 110000, 10000):
        save(tmp_path / f"model_{step:08}.pth", step, step=step)
    (tmp_path / name).write_text(text)
    assert "names it" not in reasons(tmp_path)["model_00020000.pth"]
