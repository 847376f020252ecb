"""Weights of bitsandbytes in training states: read with their scales, carried, and missed.

The sample is of bitsandbytes 0.50 (tests/data/optimizers): NF4 with nested scales, FP4, int8.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save

import ftckpt as api
from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import CorruptError, ExitCode, UnsupportedError
from tests.builders.checkpoints import flip, open_checkpoint

DATA = Path(__file__).parents[2] / "data" / "optimizers"
SAMPLE = DATA / "bitsandbytes_linear.pt"
TRUTH: dict[str, torch.Tensor] = load_file(DATA / "bitsandbytes_linear.safetensors")
PARAMETERS = 64 * 96 + 96 + 96 * 64 + 64 * 32 + 32


def state() -> dict[str, Any]:
    return {"model": dict(TRUTH), "step": 3}


def save_with_dcp(saved: dict[str, Any], place: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves is what is meant
        save(saved, checkpoint_id=place, no_dist=True)


@pytest.fixture(params=["torchsave", "dcp"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "torchsave":
        place = tmp_path / "saved.pt"
        place.write_bytes(SAMPLE.read_bytes())
        return place
    save_with_dcp(state(), tmp_path / "saved")
    return tmp_path / "saved"


def test_they_are_shown_for_what_they_are(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    shown = api.inspect(str(saved))
    assert shown.parameters == PARAMETERS
    kinds = {name: checkpoint.tensors[name].kind for name in TRUTH}
    assert {name for name, kind in kinds.items() if kind is Kind.PARAM} == {
        "0.weight", "0.bias", "1.weight", "2.weight", "2.bias"
    }  # fmt: skip
    assert {kinds[name] for name in kinds if "absmax" in name or "SCB" in name} == {Kind.SCALE}
    assert checkpoint.quantised["0.weight"].shape == (96, 64)
    assert api.verify(str(saved), level="values").code is ExitCode.OK


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("too long", torch.zeros(1, dtype=torch.uint8).expand(1 << 33)),
        ("no number", torch.frombuffer(
            bytearray(b'{"shape": [2, 2], "blocksize": 64, "nested_offset": 1' + b"0" * 400 + b"}"),
            dtype=torch.uint8)),
    ],
)  # fmt: skip
def test_a_state_that_bitsandbytes_does_not_write(
    name: str, state: torch.Tensor, tmp_path: Path
) -> None:
    codes = torch.zeros(2, 1, dtype=torch.uint8)
    scale, table = torch.ones(1), torch.zeros(16)
    weights = {"0.weight": codes, "0.weight.absmax": scale, "0.weight.quant_map": table}
    weights["0.weight.quant_state.bitsandbytes__nf4"] = state
    torch.save(weights, tmp_path / "saved.pt")
    with pytest.raises(CorruptError, match="does not say how"):
        api.inspect(str(tmp_path / "saved.pt"))


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_every_tensor_is_carried_bit_for_bit(saved: Path, to: str, tmp_path: Path) -> None:
    api.convert(str(saved), str(tmp_path / "out"), to)
    result = open_checkpoint(tmp_path / "out")
    for name, wanted in TRUTH.items():
        assert read_tensor(result, name) == wanted.flatten().view(torch.uint8).numpy().tobytes()
    with pytest.raises(UnsupportedError, match="bitsandbytes"):
        api.convert(str(saved), str(tmp_path / "cast"), to, dtype="bf16")


@pytest.mark.parametrize("lost", ["0.weight.absmax", "1.weight.quant_map", "0.weight"])
def test_a_lost_part_is_found(lost: str, tmp_path: Path) -> None:
    held = {name: value for name, value in TRUTH.items() if name != lost}
    torch.save({"model": held, "step": 3}, tmp_path / "lost.pt")
    save_with_dcp({"model": held, "step": 3}, tmp_path / "lost")
    for place in ("lost.pt", "lost"):
        report = api.verify(str(tmp_path / place))
        assert report.code is ExitCode.CORRUPT
        assert {f.kind for f in report.findings} & {"missing-scale", "lone-scale"}


def test_a_flipped_bit_of_a_scale_is_found(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    extent = checkpoint.payload(checkpoint.tensors["0.weight.nested_absmax"].pieces[0]).extent
    flip(saved / extent.file if saved.is_dir() else saved, extent.offset + 1)
    assert api.verify(str(saved), level="content").code is ExitCode.CORRUPT
