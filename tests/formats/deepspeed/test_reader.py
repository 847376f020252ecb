"""DeepSpeed's own checkpoints: what its engine saved, whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.checkpoint import CommitState
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.formats.deepspeed import DeepSpeed
from tests.conformance.formats import FormatTests, Made, Truth
from tests.formats.deepspeed.sets import made, opened, tensors_of, unpacked

SETS = (
    "z1", "z2", "z3", "bf16", "pipe", "tp", "wrap", "off",
    "moe_z1", "moe_z2", "moe_data", "moe_bf16", "moe_off", "autotp",
    "lora_z2", "lora_z3", "lora_left", "autoep_z1", "autoep_data", "autoep_off", "autoep_z3",
    "autoep_frozen",
)  # fmt: skip


class TestDeepSpeed(FormatTests):
    format = DeepSpeed()
    truncated = frozenset({"bad-zip", "truncated-file"})
    missing = frozenset({"missing-rank", "missing-file"})
    empty = frozenset({"bad-zip", "truncated-file"})

    def make(self, root: Path) -> list[Made]:
        return [made(name, root) for name in SETS]

    def victims(self, path: Path) -> list[str]:
        """Which layer lacks a tied module is recorded nowhere, so no finding can name its file."""
        return [file for file in super().victims(path) if file != "layer_00-model_states.pt"]


BESIDE = {
    "ds_z1_w4_bf16": (3, 1, (1, 1, 4)),
    "ds_z2_w2_bf16": (3, 2, (1, 1, 2)),
    "ds_z3_w2_fp32": (3, 3, (1, 1, 2)),
    "ds_pp2dp2_z1_bf16": (2, 1, (2, 1, 2)),
}


@pytest.mark.parametrize("name", BESIDE)
def test_a_real_job_reads_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    step, stage, (pp, tp, dp) = BESIDE[name]
    place = unpacked(name, tmp_path)
    checkpoint = opened(place / "ckpt" / f"global_step{step}")
    truth: dict[str, Truth] = {}
    for key, value in tensors_of(place / "truth" / "state.safetensors").items():
        truth[f"master:{key}" if f"master:{key}" in checkpoint.tensors else key] = value
    for key, value in tensors_of(place / "truth" / "optim.safetensors").items():
        parameter, _, moment = key.rpartition(".")
        truth[f"{moment}:{parameter}"] = value
    if (weights := place / "truth" / "bf16_params.safetensors").exists():
        truth |= tensors_of(weights)
    for key, (dtype, shape, data) in truth.items():
        info = checkpoint.tensors[key]
        assert (info.dtype.name, info.shape) == (dtype, shape)
        assert read_tensor(checkpoint, key) == data, key
    left = checkpoint.tensors.keys() - truth.keys()
    assert all(key.endswith(".step") or f"master:{key}" in truth for key in left)
    assert [*checkpoint.check(), *checkpoint.notes] == []
    topology = checkpoint.topology
    assert (topology.pp, topology.tp, topology.dp) == (pp, tp, dp)
    assert topology.world_size == pp * tp * dp
    assert (checkpoint.step, checkpoint.stage) == (step, stage)
    assert checkpoint.commit.state is CommitState.NO_MARKER
