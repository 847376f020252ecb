"""Plain shards whose placements are on several mesh axes, as trainers write them by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode
from tests.builders.checkpoints import open_checkpoint
from tests.json_run import ftckpt_json

WHOLE = torch.arange(48, dtype=torch.float32).reshape(8, 6)
AXES = (["Replicate()", "Shard(0)"], ["Shard(0)", "Shard(1)"], ["Shard(1)", "Replicate()"],
        ["Shard(0)", "Shard(0)"])  # fmt: skip


def piece(placements: list[str], at: tuple[int, int]) -> torch.Tensor:
    value = WHOLE
    for one, place in zip(placements, at, strict=True):
        if one.startswith("Shard"):
            value = value.chunk(2, int(one[6]))[place]
    return value.clone()


def save(folder: Path, placements: list[str], said: Any, **more: Any) -> None:
    for rank in range(4):
        part = piece(placements, divmod(rank, 2))
        entry = {"data": part, "placements": said, "global_shape": [8, 6]}
        torch.save({"shard": {"w": entry}, "rank": rank, **more}, folder / f"rank_{rank}.pt")


@pytest.mark.parametrize("placements", AXES, ids=str)
@pytest.mark.parametrize("spelling", ["text", "dicts", "tuples"])
def test_they_merge(placements: list[str], spelling: str, tmp_path: Path) -> None:
    said: list[Any] = list(placements)
    if spelling != "text":
        dims = [int(one[6]) if one.startswith("Shard") else None for one in placements]
        said = [("replicate",) if d is None else ("shard", d) for d in dims]
    if spelling == "dicts":
        said = [{"type": one[0], "dim": (*one, None)[1]} for one in said]
    save(tmp_path, placements, said, mesh_shape=[2, 2])
    assert ftckpt_json("verify", str(tmp_path))["result"]["code"] == 0
    checkpoint = open_checkpoint(tmp_path)
    assert read_tensor(checkpoint, "w") == WHOLE.numpy().tobytes()
    (tmp_path / "rank_3.pt").unlink()
    assert ftckpt_json("verify", str(tmp_path))["result"]["code"] == ExitCode.INCOMPLETE


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, [[0, 1], [2, 3]], {"shape": [2, 2]}], ids=str)
def test_spellings_of_the_mesh(mesh: Any, tmp_path: Path) -> None:
    save(tmp_path, AXES[1], AXES[1], mesh=mesh)
    assert read_tensor(open_checkpoint(tmp_path), "w") == WHOLE.numpy().tobytes()


def test_coordinates_stand_above_the_order_of_ranks(tmp_path: Path) -> None:
    for rank, at in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        entry = {"data": piece(AXES[1], at), "placements": AXES[1], "global_shape": [8, 6],
                 "mesh_shape": (2, 2), "mesh_coordinate": at}  # fmt: skip
        torch.save({"shard": {"w": entry}, "rank": rank}, tmp_path / f"rank_{rank}.pt")
    assert read_tensor(open_checkpoint(tmp_path), "w") == WHOLE.numpy().tobytes()


@pytest.mark.parametrize("mesh", [None, [4], [[0, 2], [1, 3]]], ids=str)
def test_what_says_no_place_is_refused_by_name(mesh: Any, tmp_path: Path) -> None:
    save(tmp_path, AXES[0], AXES[0], **({} if mesh is None else {"mesh": mesh}), world_size=4)
    answer = ftckpt_json("verify", str(tmp_path))["result"]
    assert answer["code"] == ExitCode.UNSUPPORTED
    assert "w is placed on 2 mesh axes" in answer["message"]


def test_a_shard_of_another_shape_is_damage(tmp_path: Path) -> None:
    save(tmp_path, AXES[1], AXES[0], mesh_shape=[2, 2])
    assert ftckpt_json("verify", str(tmp_path))["result"]["code"] == ExitCode.CORRUPT
