"""Weights that were saved without their values are damage, whatever their file looks like."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ftckpt.findings import Severity
from ftckpt.verification import Level, VerifyOptions, verify
from tests.builders.checkpoints import open_checkpoint
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


def of(module: str, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    begin = f"base_model.model.layers.{module}.lora_"
    return {f"{begin}{n.replace('_', '.')}.weight": torch.ones(s) for n, s in shapes.items()}


Q = of("0.q_proj", A=(4, 6), B=(6, 4))
V = of("0.v_proj", A=(4, 6), B=(6, 4))
HYDRA = of("0.v_proj", A=(4, 6), B_0=(6, 4), B_1=(6, 4))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize(
    ("weights", "kind", "code"),
    [
        ({A: FULL, B: FULL.T}, "", 0),
        (Q | of("0.v_proj", A=(4, 6)), "missing-tensor", 4),
        (Q | of("0.v_proj", B=(6, 4)), "missing-tensor", 4),
        ({A: FULL.T, B: FULL.T}, "shape-mismatch", 4),
        (Q | of("1.q_proj", A=(8, 6), B=(6, 4)), "shape-mismatch", 4),
        # Nothing in the file says that there was another.
        ({A: FULL}, "state-unknown", 0),
        (of("0.v_proj", B=(6, 4)) | of("0.q_proj", B=(6, 4)), "state-unknown", 0),  # FFA-LoRA
        (HYDRA, "state-unknown", 0),
        (Q | HYDRA, "state-unknown", 0),
        (of("0.v_proj", A=(4, 6), B0=(6, 4)), "state-unknown", 0),  # LoRAMoE
        (of("0.v_proj", A=(8, 6), B=(6, 4)), "", 0),  # two groups of four
        (V | of("0.qkv", A=(12, 6), B=(18, 4)), "state-unknown", 0),
    ],
)
def test_an_adapters_matrices_are_pairs(
    tmp_path: Path, name: str, weights: dict[str, torch.Tensor], kind: str, code: int
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    if name.endswith(".bin"):
        torch.save(weights, tmp_path / name)
    else:
        save_file({n: t.clone().contiguous() for n, t in weights.items()}, tmp_path / name)
    report = verify(open_checkpoint(tmp_path), VerifyOptions(level=Level.STRUCTURE))
    assert report.code == code
    told = [f.kind for f in report.findings if f.severity is not Severity.NOTE]
    assert told == [kind] * bool(kind)
