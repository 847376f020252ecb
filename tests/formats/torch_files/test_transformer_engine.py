"""Transformer Engine's weights in few bits: read, carried, written back as they were pickled.

What each class's pickle holds is in its source; `float8_like` pickles in the same way.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import ftckpt as api
from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode, FtckptError
from tests.builders.checkpoints import flip, open_checkpoint
from tests.formats.dcp.writing import save as save_dcp
from tests.formats.torch_files.float8_like import DType, installed

DATA = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
TURNED = torch.arange(24, 48, dtype=torch.uint8).reshape(6, 4)
SCALE, OTHER = torch.tensor([0.5]), torch.tensor([0.25])
SHAPE, CODE, SHOWN = torch.Size((4, 6)), DType(7), torch.bfloat16
WAYS = (DATA, SCALE, TURNED, OTHER)
NAMED = {"_rowwise_data": DATA, "_rowwise_scale_inv": SCALE, "_columnwise_data": TURNED,
         "_columnwise_scale_inv": OTHER}  # fmt: skip
KINDS: dict[str, tuple[str, str, tuple[Any, ...], dict[str, torch.Tensor]]] = {
    "Float8Tensor": (
        "float8_tensor", "_make_float8_tensor_in_reduce_ex", (DATA, CODE, SCALE, SHOWN, SHAPE),
        {"_data": DATA, "_scale_inv": SCALE},
    ),
    "MXFP8Tensor": (
        "mxfp8_tensor", "_make_mxfp8_tensor_in_reduce_ex", (*WAYS, CODE, SHOWN, SHAPE, None), NAMED,
    ),
    "Float8BlockwiseQTensor": (
        "float8_blockwise_tensor", "_make_float8_blockwise_tensor_in_reduce_ex",
        (SHAPE, *WAYS, CODE, SHOWN, None, True, None), NAMED,
    ),
    "NVFP4Tensor": (
        "nvfp4_tensor", "_make_nvfp4_tensor_in_reduce_ex",
        (SHAPE, *WAYS, OTHER, SCALE, CODE, SHOWN, None),
        {**NAMED, "_amax_rowwise": OTHER, "_amax_columnwise": SCALE},
    ),
}  # fmt: skip


class Case:
    """One class: a model with a weight of it, and the tensors inside."""

    def __init__(self, name: str, *, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        module, function, self.parts, self.inside = KINDS[name]
        self.kind = installed(monkeypatch, module, name, function, old=old)
        extra = torch.frombuffer(bytearray(pickle.dumps({"recipe": 1})), dtype=torch.uint8)
        bias = torch.ones(4, dtype=SHOWN)
        self.model = {"l.weight": self.kind(*self.parts), "l.bias": bias, "l._extra_state": extra}

    def require_inside(self, path: Path) -> None:
        checkpoint = open_checkpoint(path)
        for part, tensor in self.inside.items():
            assert read_tensor(checkpoint, f"l.weight.{part}") == tensor.numpy().tobytes()
        assert "l._extra_state" in checkpoint.tensors

    def require_weight(self, weight: Any) -> None:
        assert type(weight) is self.kind
        for mine, theirs in zip(self.parts, weight.parts, strict=True):
            if isinstance(mine, torch.Tensor):
                assert torch.equal(mine, theirs)
            elif isinstance(mine, DType):
                assert mine.code == theirs.code
            else:
                assert mine == theirs


@pytest.fixture(params=[f"{name}-{how}" for name in KINDS for how in ("method", "function")])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    name, how = request.param.split("-")
    return Case(name, old=how == "method", monkeypatch=monkeypatch)


def test_torch_save(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"model": case.model}, path)
    case.require_inside(path)
    kinds = {key: info.kind for key, info in open_checkpoint(path).tensors.items()}
    elements = [key for key, kind in kinds.items() if kind is Kind.PARAM]
    assert sorted(elements) == ["l.bias", f"l.weight.{next(iter(case.inside))}"]
    assert api.verify(str(path), level="values").code is ExitCode.OK
    api.convert(str(path), str(tmp_path / "again.pt"), "torchsave")
    case.require_inside(tmp_path / "again.pt")
    case.require_weight(torch.load(tmp_path / "again.pt", weights_only=False)["model"]["l.weight"])
    api.convert(str(path), str(tmp_path / "folder"), "safetensors")
    case.require_inside(tmp_path / "folder")
    data = open_checkpoint(path).tensors[f"l.weight.{next(iter(case.inside))}"].pieces[0].extent
    flip(path, data.offset + 3)
    report = api.verify(str(path))
    assert report.code is ExitCode.CORRUPT
    assert any("l.weight" in (f.tensor or "") for f in report.findings)


def test_dcp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = Case("Float8Tensor", old=True, monkeypatch=monkeypatch)
    save_dcp({"model": case.model}, tmp_path / "step-1")
    case.require_inside(tmp_path / "step-1")
    api.convert(str(tmp_path / "step-1"), str(tmp_path / "out.pt"), "torchsave")
    case.require_weight(torch.load(tmp_path / "out.pt", weights_only=False)["model"]["l.weight"])


class Other:
    """Not a class whose method is known."""

    def __reduce__(self) -> Any:
        return getattr, (dict, "_make_in_reduce_ex", None)


def test_another_getattr_is_refused(tmp_path: Path) -> None:
    torch.save({"w": Other()}, tmp_path / "other.pt")
    assert api.verify(str(tmp_path / "other.pt")).code is ExitCode.UNSAFE


@pytest.mark.parametrize("wrong", [("text", CODE, SCALE, SHOWN, SHAPE), (None,) * 5, (), (DATA,)])
def test_arguments_that_it_never_has_are_refused(
    wrong: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = Case("Float8Tensor", old=False, monkeypatch=monkeypatch)
    weight: Any = case.model["l.weight"]
    weight.parts = wrong
    torch.save(case.model, tmp_path / "wrong.pt")
    with pytest.raises(FtckptError):
        open_checkpoint(tmp_path / "wrong.pt")
