"""Faults of released writers: their traces are found, and named, and sound saves have none.

The samples are made as the faulty code makes them; the module has the sources.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ftckpt import open_checkpoint, verify
from ftckpt.findings import Finding
from ftckpt.verification.places import PlaceReport
from tests.formats.dcp.writing import save
from tests.formats.megatron.torch_dist.test_reader import torch_dist

SHAPES = {"decoder.final_layernorm.weight": (7,), "output_layer.weight": (9, 5)}
STATES = ("fp32_param", "exp_avg", "exp_avg_sq")
# A parameter begins at a multiple of 64 elements, and a bucket ends at a multiple of 128.
BEGIN, END = 64, 128


def saved_by_megatron(path: Path, *, buckets: int, mended: bool) -> Path:
    """Write what `sharded_param_state_fully_reshardable` makes of a grad buffer.

    The world tensors hold the buckets without the padding at their ends. A parameter is cut out of
    them by its place in the buffer with that padding, which #5077 subtracts.
    """
    torch.manual_seed(5)
    weights = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    state: dict[str, Any] = dict(weights)
    names = list(SHAPES)
    parted = [[name] for name in names] if buckets == 2 else [names]
    for kind in STATES:
        whole = {
            name: weights[name].float() if kind == "fp32_param" else torch.rand(shape) + 0.1
            for name, shape in SHAPES.items()
        }
        packed, places, at, stripped = [], {}, 0, 0
        for bucket in parted:
            unpadded = []
            for name in bucket:
                size = whole[name].numel()
                places[name] = (at, stripped)
                begun = -(-size // BEGIN) * BEGIN
                unpadded.append(torch.nn.functional.pad(whole[name].flatten(), (0, begun - size)))
                at += begun
            end = -(-at // END) * END
            stripped += end - at
            at = end
            packed += unpadded
        world = torch.cat(packed)
        for name, (start, before) in places.items():
            start -= before if mended else 0
            cut = world[start : start + whole[name].numel()]
            cut = torch.nn.functional.pad(cut, (0, whole[name].numel() - cut.numel()))
            state[f"optimizer.state.{kind}.{name}"] = cut.reshape(SHAPES[name])
    common = {"optimizer": {"param_state_sharding_type": "fully_reshardable"}, "iteration": 1}
    state["common_state/shard_0_1"] = [common]
    return torch_dist(path, state)


def named(report: PlaceReport) -> list[Finding]:
    return [found for found in report.findings if found.kind == "known-fault"]


def test_megatron_with_several_buckets(tmp_path: Path) -> None:
    path = saved_by_megatron(tmp_path / "iter_0000001", buckets=2, mended=False)
    report = verify(str(path), level="values")
    (found,) = named(report)
    assert report.code == 4
    assert found.tensor is not None
    assert found.tensor.endswith("output_layer.weight")
    assert "#5077" in found.message
    assert "--no-load-optim" in found.message


@pytest.mark.parametrize(("buckets", "mended"), [(2, True), (1, False)])
def test_a_sound_megatron_has_no_trace(tmp_path: Path, buckets: int, mended: bool) -> None:
    path = saved_by_megatron(tmp_path / "iter_0000001", buckets=buckets, mended=mended)
    report = verify(str(path), level="values")
    assert (report.code, named(report)) == (0, [])
    assert not [f for f in report.findings if f.kind == "master-differs"]


def test_masters_that_differ_for_another_reason(tmp_path: Path) -> None:
    """Zeros that the weight has too: rows of padding, whose moments are zero in every save."""
    weight = torch.randn(9, 5, dtype=torch.bfloat16)
    weight[7:] = 0
    master = weight.float()
    master[0, 0] += 1
    moment = (weight != 0).float()
    state: dict[str, Any] = {"output_layer.weight": weight}
    for kind, held in zip(STATES, (master, moment, moment), strict=True):
        state[f"optimizer.state.{kind}.output_layer.weight"] = held
    common = {"optimizer": {"param_state_sharding_type": "fully_reshardable"}, "iteration": 1}
    path = torch_dist(tmp_path / "iter_0000001", state | {"common_state/shard_0_1": [common]})
    report = verify(str(path), level="values")
    assert [f.kind for f in report.findings if f.kind == "master-differs"]
    assert not named(report)


def test_moments_of_a_weight_of_one_row(tmp_path: Path) -> None:
    """FusedAdam saved `shared_expert_gate.weight` [1, 2048] as the rank's own [0, 2048]."""
    gate = "layers.0.mlp.shared_expert_gate.weight"
    state: dict[str, Any] = {
        "model": {gate: torch.rand(1, 64), "norm.weight": torch.rand(64)},
        "optim": {"state": {
            gate: {"exp_avg": torch.zeros(0, 64), "exp_avg_sq": torch.zeros(0, 64),
                   "step": torch.tensor(3.0)},
            "norm.weight": {"exp_avg": torch.rand(64), "exp_avg_sq": torch.rand(64),
                            "step": torch.tensor(3.0)},
        }},
    }  # fmt: skip
    path = tmp_path / "step-3"
    save(state, path)
    opened = open_checkpoint(str(path))
    assert any(not info.numel for info in opened.tensors.values())
    report = verify(str(path), level="values")
    assert report.code == 4
    assert len({f.tensor for f in named(report)}) == 2
    assert "before 2.14" in named(report)[0].message


@pytest.mark.parametrize(("held", "faults"), [(4, 1), (8, 0)])
def test_an_adapter_of_one_rank(tmp_path: Path, held: int, faults: int) -> None:
    base = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {}
    for layer in range(2):
        tensors[base.format(layer, "A")] = torch.rand(held, 16)
        tensors[base.format(layer, "B")] = torch.rand(16, 8)
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}'
    )
    report = verify(str(tmp_path), level="values")
    assert len(named(report)) == faults
    assert report.code == (4 if faults else 0)
    assert all("#4206" in found.message for found in named(report))
