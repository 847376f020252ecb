"""Megatron-Core's torch_dist: layers, experts and optimizer state under their own names."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ftckpt.formats.megatron_dist import MegatronDist
from tests.format_suite import FormatTests, Made, Truth
from tests.formats.dcp_writing import truth_of

ARCHIVES = Path(__file__).parents[3] / "shared" / "checkpoints"
SETS = (
    "mcore_torchdist_tp2pp2",
    "mcore_torchdist_tp2dp2_fullyreshard_bf16",
    "mcore0161_tp2dp2_dpreshard",
)
_KINDS = {"param": "master:", "exp_avg": "exp_avg:", "exp_avg_sq": "exp_avg_sq:"}


def by_layer(stacked: dict[str, torch.Tensor]) -> dict[str, Truth]:
    """Return the truth by key, a tensor a layer, of tensors that are stacked over layers."""
    truth = {}
    for name, tensor in stacked.items():
        prefix = ""
        if name.startswith("optimizer.state."):
            state, _, name = name.removeprefix("optimizer.state.").partition(".")
            prefix = _KINDS[state]
        head, found, rest = name.partition(".layers.")
        if not found:
            truth[prefix + name] = truth_of(tensor)
            continue
        for layer, part in enumerate(tensor):
            truth[f"{prefix}{head}.layers.{layer}.{rest}"] = truth_of(part)
    return truth


class TestMegatronDist(FormatTests):
    """The promises of every format, on checkpoints that Megatron wrote."""

    format = MegatronDist()

    def make(self, root: Path) -> list[Made]:
        made = []
        for name in SETS:
            archive = ARCHIVES / f"{name}.tar.xz"
            if not archive.exists():
                pytest.skip(f"no real checkpoints at {ARCHIVES}")
            with tarfile.open(archive) as tar:
                tar.extractall(root, filter="data")
            truth: dict[str, Truth] = {}
            for file in ("state", "optim"):
                truth |= by_layer(load_file(root / name / "truth" / f"{file}.safetensors"))
            made.append(Made(root / name / "ckpt" / "iter_0000003", truth))
        return made
