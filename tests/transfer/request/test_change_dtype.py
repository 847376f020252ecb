"""Weights of another type: which are cast, which stay, and what may not be."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.checkpoint import Kind
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.safetensors.writer import SafetensorsWriter
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.request.change_dtype import retype
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import materialise
from tests.transfer.contents import content_of

TENSORS = {
    "w": ("model", "param", (3,), "float32"),
    "half": ("model", "param", (3,), "float16"),
    "counter": ("model", "buffer", (), "int64"),
    "mean": ("model", "buffer", (3,), "float32"),
    "ema": ("ema", "param", (3,), "float32"),
    "w ": ("optimizer", "master", (3,), "float32"),
}


@pytest.mark.parametrize(
    ("flag", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_floating_weights_of_the_model_are_cast(flag: str, name: str) -> None:
    made = retype(content_of(TENSORS), flag)
    assert {key: wanted.dtype.name for key, wanted in made.tensors.items()} == {
        "w": name,
        "half": name,
        "counter": "int64",
        "mean": "float32",
        "ema:ema": "float32",
        "master:w ": "float32",
    }


def test_others_are_cast_where_that_is_asked() -> None:
    made = retype(content_of(TENSORS), "bf16", components=("ema",))
    assert made.tensors["ema:ema"].dtype.name == "bfloat16"
    assert made.tensors["w"].dtype.name == "float32"
    made = retype(content_of(TENSORS), "bf16", kinds=(Kind.BUFFER,))
    assert made.tensors["mean"].dtype.name == "bfloat16"
    assert made.tensors["counter"].dtype.name == "int64"


def test_what_has_scales_beside_it_is_refused() -> None:
    content = content_of({"w": ("model", "param", (3,), "float8_e4m3fn")})
    with pytest.raises(UnsupportedError, match=r"w is float8_e4m3fn.*scales"):
        retype(content, "bf16")
    with pytest.raises(UsageError, match="int4 is not a type to cast to: bf16, fp16, fp32 are"):
        retype(content, "int4")


def test_ties_survive_a_cast(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    weight = torch.tensor([1.0, 1.00390625, 3.0e38])
    torch.save({"embed.weight": weight, "lm_head.weight": weight}, tmp_path / "x.pt")
    before = open_checkpoint(tmp_path / "x.pt")
    content = retype(Content.of(before), "bf16")
    materialise(SafetensorsWriter().layout(content, LayoutRequest()), before, tmp_path / "out")
    after = open_checkpoint(tmp_path / "out")
    assert after.aliases == {"lm_head.weight": "embed.weight"}
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert loaded["embed.weight"].equal(weight.bfloat16())
