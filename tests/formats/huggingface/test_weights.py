"""Weights that were saved without their values are damage, whatever their file looks like."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.json_run import ftckpt_json

A, B = (f"base_model.model.q_proj.lora_{one}.weight" for one in "AB")
FULL = torch.ones(2, 3)
EMPTY = torch.empty(0)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({}, "holds no tensor"),
        ({A: EMPTY, B: EMPTY}, "all 2 weights"),
        ({A: FULL, B: EMPTY}, f"1 weight of an adapter without elements: {B}"),
        ({A: FULL, B: FULL.T, "scale": EMPTY}, ""),  # an empty buffer of a model is its own affair
    ],
)
def test_an_adapter_without_values(
    tmp_path: Path, name: str, weights: dict[str, torch.Tensor], says: str
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    if name.endswith(".bin"):
        torch.save(weights, tmp_path / name)
    else:
        save_file({n: t.clone().contiguous() for n, t in weights.items()}, tmp_path / name)
    answer = ftckpt_json("verify", str(tmp_path))
    found = [one for one in answer["findings"] if one["kind"] == "empty-weights"]
    assert bool(found) == bool(says)
    assert answer["result"]["code"] == (4 if says else 0)
    assert all(says in one["message"] and one["file"] == name for one in found)


def test_one_file_without_a_tensor(tmp_path: Path) -> None:
    save_file({}, tmp_path / "model.safetensors")
    assert ftckpt_json("verify", str(tmp_path / "model.safetensors"))["result"]["code"] == 4


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        ({A: FULL, B: FULL.T}, ""),
        ({A: FULL}, "missing-tensor"),
        ({B: FULL.T}, "missing-tensor"),
        ({A: FULL.T, B: FULL.T}, "shape-mismatch"),
    ],
)
def test_an_adapters_matrices_are_pairs(
    tmp_path: Path, name: str, weights: dict[str, torch.Tensor], kind: str
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    if name.endswith(".bin"):
        torch.save(weights, tmp_path / name)
    else:
        save_file({n: t.clone().contiguous() for n, t in weights.items()}, tmp_path / name)
    answer = ftckpt_json("verify", str(tmp_path))
    assert answer["result"]["code"] == (4 if kind else 0)
    assert [f["kind"] for f in answer["findings"] if f["severity"] == "error"] == [kind] * bool(
        kind
    )
