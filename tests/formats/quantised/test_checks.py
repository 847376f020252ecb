"""What inspect and verify say of quantised folders, whole and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path

import numpy as np
import pytest

import ftckpt
from ftckpt.checkpoint import Kind
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.verification import VerifyReport

DATA = Path(__file__).parents[2] / "data" / "quantised"
FOLDERS = sorted(json.loads((DATA / "truth.json").read_text()))
Tensors = dict[str, tuple[str, list[int], bytes]]


def read(file: Path) -> Tensors:
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    header.pop("__metadata__", None)
    return {
        name: (one["dtype"], one["shape"], raw[end:][slice(*one["data_offsets"])])
        for name, one in header.items()
    }


def write(folder: Path, tensors: Tensors) -> None:
    at, header, data = 0, {}, b""
    for name, (dtype, shape, held) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(held)]}
        at, data = at + len(held), data + held
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def damaged(folder: str, tmp_path: Path, change: Callable[[Tensors], None]) -> str:
    made = tmp_path / "damaged"
    shutil.copytree(DATA / folder, made)
    tensors = read(made / "model.safetensors")
    change(tensors)
    write(made, tensors)
    return str(made)


def kinds(report: VerifyReport) -> list[str]:
    return sorted({one.kind for one in report.findings if one.severity == "error"})


@pytest.mark.parametrize("folder", FOLDERS)
def test_scales_are_no_parameters(folder: str) -> None:
    opened = ftckpt.open_checkpoint(str(DATA / folder))
    weights = opened.quantised.values()
    found = ftckpt.inspect(str(DATA / folder))
    truth = json.loads((DATA / "truth.json").read_text())[folder]
    assert {one.name for one in weights} == set(truth)
    assert found.parameters == sum(prod(one.shape) for one in weights) + 24
    beside = {key for one in weights for key in one.parts.values()}
    assert {k for k, info in opened.tensors.items() if info.kind is Kind.SCALE} >= beside
    assert found.bytes.by_kind["scale"] > 0
    assert "quantised by" in found.dialect


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_whole_folder_passes(folder: str) -> None:
    assert ftckpt.verify(str(DATA / folder), level="values").code == 0


def scale_of(tensors: Tensors) -> str:
    ends = ("_scale_inv", ".weight_scale", "_scales", ".absmax", ".SCB")
    return next(name for name in tensors if name.endswith(ends))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_missing_scale_is_damage(folder: str, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors[scale_of(tensors)]

    path = damaged(folder, tmp_path, change)
    report = ftckpt.verify(path)
    assert (report.code, kinds(report)) == (4, ["missing-scale"])


@pytest.mark.parametrize("folder", [f for f in FOLDERS if not f.startswith("bnb-")])
def test_a_misshapen_scale_is_damage(folder: str, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        name = scale_of(tensors)
        dtype, shape, data = tensors[name]
        tensors[name] = dtype, [*shape, 2], data * 2

    path = damaged(folder, tmp_path, change)
    report = ftckpt.verify(path)
    assert (report.code, kinds(report)) == (4, ["scale-shape"])
    with pytest.raises(CorruptError):
        ftckpt.convert(path, str(tmp_path / "out"), "safetensors", dtype="bf16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("folder", "suffix"),
    [
        ("bnb-nf4", ".quant_map"),
        ("bnb-nf4", ".up_proj.weight"),
        ("bnb-nf4", ".bitsandbytes__nf4"),
        ("bnb-nf4-nested", ".absmax"),
        ("bnb-nf4-nested", ".nested_quant_map"),
        ("bnb-nf4-nested", ".nested_absmax"),
    ],
)
def test_sizes_that_a_state_does_not_give_are_damage(
    folder: str, suffix: str, tmp_path: Path
) -> None:
    """What is too short would have been read on into the tensor behind it."""

    def change(tensors: Tensors) -> None:
        name = next(one for one in tensors if one.endswith(suffix))
        dtype, shape, data = tensors[name]
        if suffix == ".bitsandbytes__nf4":
            state = json.loads(data)
            state["shape"][0] += 2
            data = json.dumps(state).encode()
            tensors[name] = dtype, [len(data)], data
        elif shape[0] > 1:
            tensors[name] = dtype, [shape[0] // 2, *shape[1:]], data[: len(data) // 2]
        else:
            tensors[name] = dtype, [2], data * 2

    path = damaged(folder, tmp_path, change)
    report = ftckpt.verify(path, level="values")
    assert (report.code, kinds(report)) == (4, ["scale-shape"])
    with pytest.raises(CorruptError, match="elements, and NF4"):
        ftckpt.convert(path, str(tmp_path / "out"), "safetensors", dtype="bf16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("folder", "value", "kind"),
    [
        ("fp8-block", np.float32(0).tobytes(), "bad-scale"),
        ("fp8-block", np.float32(-1).tobytes(), "bad-scale"),
        ("fp8-block", np.float32("inf").tobytes(), "inf"),
        ("fp8-block", np.float32("nan").tobytes(), "nan"),
        ("ct-fp8-channel", b"\0\0", "bad-scale"),
        ("ct-nvfp4", b"\x7f", "nan"),
        ("mxfp4-gpt-oss", b"\xff", "bad-scale"),
        ("ct-mxfp8", b"\xff", "bad-scale"),
        ("bnb-nf4", np.float32(-1).tobytes(), "bad-scale"),
    ],
)
def test_values_of_scales_are_judged(folder: str, value: bytes, kind: str, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        name = scale_of(tensors)
        dtype, shape, data = tensors[name]
        tensors[name] = dtype, shape, value + data[len(value) :]

    report = ftckpt.verify(damaged(folder, tmp_path, change), level="values")
    assert (report.code, kinds(report)) == (4, [kind])


def test_an_unknown_method_is_kept_and_its_values_are_refused(tmp_path: Path) -> None:
    made = tmp_path / "hqq"
    shutil.copytree(DATA / "fp8-block", made)
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="hqq"):
        ftckpt.convert(str(made), str(tmp_path / "out"), "safetensors", dtype="bf16")
    ftckpt.convert(str(made), str(tmp_path / "out"), "safetensors")
    assert (tmp_path / "out" / "config.json").read_bytes() == (made / "config.json").read_bytes()
    before, after = (read(one / "model.safetensors") for one in (made, tmp_path / "out"))
    assert before == after


@pytest.mark.parametrize("folder", FOLDERS)
def test_without_a_type_the_bytes_stay(folder: str, tmp_path: Path) -> None:
    ftckpt.convert(str(DATA / folder), str(tmp_path / "out"), "safetensors")
    before, after = (read(one / "model.safetensors") for one in (DATA / folder, tmp_path / "out"))
    assert before == after
    again = ftckpt.open_checkpoint(str(tmp_path / "out"))
    assert again.quantised.keys() == ftckpt.open_checkpoint(str(DATA / folder)).quantised.keys()
