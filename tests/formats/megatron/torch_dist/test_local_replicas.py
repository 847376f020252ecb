"""Local replicas: shards that ranks wrote again under other names are copies and not tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftckpt.checkpoint.replicas import copies_of
from tests.builders.checkpoints import open_checkpoint
from tests.formats.megatron.torch_dist.test_reader import of_data, torch_dist
from tests.json_run import ftckpt_json

KINDS = ("shadows", "tensor_ranks")


@pytest.mark.parametrize("name", KINDS)
def test_they_are_no_tensors_of_their_own(name: str, tmp_path: Path) -> None:
    path, truth = of_data(name, tmp_path)
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors.keys() == truth.keys()
    assert any(copies.replicas for i in checkpoint.tensors.values() for copies in copies_of(i))
    assert any("local replicas" in note.message for note in checkpoint.notes)
    assert ftckpt_json("verify", str(path), "--level", "values")["result"]["code"] == 0


@pytest.mark.parametrize("name", KINDS)
def test_another_layout_has_each_tensor_once(name: str, tmp_path: Path) -> None:
    path, truth = of_data(name, tmp_path)
    for form in ("safetensors", "dcp"):
        made = ftckpt_json("convert", str(path), str(tmp_path / form), "--to", form)
        assert made["result"]["code"] == 0
        assert open_checkpoint(tmp_path / form).tensors.keys() == truth.keys()
        assert ftckpt_json("diff", str(path), str(tmp_path / form))["result"]["code"] == 0
    assert ftckpt_json("copy", str(path), str(tmp_path / "copy"))["result"]["code"] == 0
    for file in path.iterdir():
        assert (tmp_path / "copy" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("other", ["__shadow_3__norm.weight", "norm.weight.__tp_replica_1"])
def test_one_that_differs_is_found(other: str, tmp_path: Path) -> None:
    weight = torch.arange(8.0)
    first = "norm.weight" if other.startswith("__shadow") else "norm.weight.__tp_replica_0"
    path = torch_dist(tmp_path / "ckpt", {first: weight, other: weight + (weight == 5)})
    assert list(open_checkpoint(path).tensors) == ["norm.weight"]
    assert ftckpt_json("verify", str(path), "--level", "structure")["result"]["code"] == 0
    answer = ftckpt_json("verify", str(path), "--level", "values")
    assert [f["tensor"] for f in answer["findings"] if f["kind"] == "replica-differs"] == [
        "norm.weight"
    ]


@pytest.mark.parametrize("state", [
    {"__shadow_1__norm.weight": torch.ones(8)},  # of nothing
    {"norm.weight": torch.ones(8), "__shadow_1__norm.weight": torch.ones(4)},
    {"norm.weight": torch.ones(8), "__shadow_1__norm.weight": torch.ones(8).bfloat16()},
    {"norm.weight": torch.ones(8), "__shadow_x__norm.weight": torch.ones(8)},
    {"norm.weight": torch.ones(8), f"__shadow_{10**8}__norm.weight": torch.ones(8)},
    {"norm.weight": torch.ones(8), "norm.weight.__tp_replica_": torch.ones(8)},
])  # fmt: skip
def test_what_repeats_nothing_is_a_tensor(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(torch_dist(tmp_path / "ckpt", state))
    assert len(checkpoint.tensors) == len(state)
    assert {info.stored_name for info in checkpoint.tensors.values()} == set(state)


def test_a_shadow_of_a_tensor_ranks_copy(tmp_path: Path) -> None:
    weight = torch.arange(8.0)
    names = ("w.__tp_replica_0", "w.__tp_replica_1", "__shadow_2__w.__tp_replica_1")
    checkpoint = open_checkpoint(torch_dist(tmp_path / "ckpt", dict.fromkeys(names, weight)))
    assert [piece.replica for piece in checkpoint.tensors["w"].pieces] == [0, 1, 2]
