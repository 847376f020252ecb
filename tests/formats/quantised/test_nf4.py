"""torchao's NF4 weights in another type, against what torchao computes (`make_nf4.py`)."""

from __future__ import annotations

import shutil
from pathlib import Path
from zipfile import ZipFile
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file

import ftckpt as api
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.formats.quantised.dequantise import dequantised
from tests.builders.checkpoints import open_checkpoint

DATA = Path(__file__).parents[2] / "data"
SAMPLES = DATA / "quantised" / "nf4"
CODED = DATA / "ranks" / "coded" / "nf4"
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def coded(form: str, room: Path) -> str:
    """Return the path of the sample in one of its forms, with nothing of another beside it."""
    if form == "dcp":
        return str(CODED / "dcp")
    held = room / "ranks"
    held.mkdir()
    for path in CODED.glob("rank_*.pt"):
        shutil.copy(path, held)
    return str(held)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def plain(parts: dict[str, torch.Tensor], name: str, shape: tuple[int, int]) -> torch.Tensor:
    """Return a weight from its parts, with torch, step by step as torchao does it."""
    codes, scales, factors, mean, table = (
        parts[f"{name}.{part}"]
        for part in (
            "quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean", "nf4"
        )
    )  # fmt: skip
    wide = scales.view(len(factors), -1) / factors.unsqueeze(-1)
    each = (wide.flatten() + mean).repeat_interleave(2 * len(codes) // len(scales))
    both = torch.stack([codes >> 4, codes & 15], dim=-1).flatten()
    return (table[both.long()] * each).reshape(shape)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_what_torchao_computes(stored: str, dtype: str, tmp_path: Path) -> None:
    source = str(SAMPLES / f"{stored}.pt")
    api.convert(source, str(tmp_path / "out"), to="safetensors", dtype=dtype)
    made = load_file(tmp_path / "out" / "model.safetensors")
    truth = load_file(SAMPLES / f"{stored}.safetensors")
    assert made.keys() == {*truth, "norm"}
    for name, wanted in truth.items():
        assert made[name].dtype is TYPES[dtype]
        assert made[name].shape == wanted.shape
        assert raw(made[name]) == raw(wanted.to(TYPES[dtype]))


@pytest.mark.parametrize("target", ["dcp", "ranks", "torchsave"])
@pytest.mark.parametrize("source", ["ranks", "dcp"])
def test_weights_that_are_cut_over_ranks(source: str, target: str, tmp_path: Path) -> None:
    """No record of a subclass is left beside them, and the paths stay."""
    out = tmp_path / ("out.pt" if target == "torchsave" else "out")
    api.convert(coded(source, tmp_path), str(out), to=target, dtype="bf16")
    made = open_checkpoint(out)
    truth = load_file(CODED / "truth.safetensors")
    assert made.tensors.keys() == {"0.weight", "1.weight", "1.bias"}
    assert all(name.endswith("step") for name in made.objects)
    for name, shape in (("0.weight", (64, 128)), ("1.weight", (128, 64))):
        assert made.tensors[name].shape == shape
        assert bytes(read_tensor(made, name)) == raw(plain(truth, name, shape))


def test_a_part_of_a_weight_is_the_same(tmp_path: Path) -> None:
    """Bytes from anywhere: inside an element, inside a block, over blocks."""
    made = dequantised(open_checkpoint(SAMPLES / "bfloat16.pt"), DTYPES["float32"])
    whole = bytes(read_tensor(made, "matrix"))
    (piece,) = made.tensors["matrix"].pieces
    with made.source.open(piece.extent.file) as reader:
        for start, count in ((0, 1), (3, 250), (127, 2), (129, 4000), (len(whole) - 1, 1)):
            assert reader.read(start, count) == whole[start : start + count]


@pytest.mark.parametrize("source", ["ranks", "dcp"])
def test_without_a_record_it_is_refused(source: str, tmp_path: Path) -> None:
    """safetensors keeps the record of one shard, which does not say the shape of the whole."""
    api.convert(coded(source, tmp_path), str(tmp_path / "held"), to="safetensors")
    with pytest.raises(UnsupportedError, match="cannot be computed: a safetensors checkpoint has"):
        api.convert(str(tmp_path / "held"), str(tmp_path / "out"), to="dcp", dtype="bf16")
    assert not (tmp_path / "out").exists()


def test_a_transposed_view_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="transposed"):
        api.convert(str(SAMPLES / "transposed.pt"), str(tmp_path / "out"), to="dcp", dtype="bf16")


@pytest.mark.parametrize(("name", "was"), [("scaler_block_size", b"K\x08"), ("block_size", b"K ")])
def test_blocks_that_do_not_fit(name: str, was: bytes, tmp_path: Path) -> None:
    held = (SAMPLES / "bfloat16.pt").read_bytes()
    at = held.index(was, held.index(name.encode()))
    changed = held[:at] + b"K\x06" + held[at + 2 :]
    with ZipFile(SAMPLES / "bfloat16.pt") as archive:
        before = archive.read("bfloat16/data.pkl")
    start = held.index(before)
    after = changed[start : start + len(before)]
    was, now = (crc32(one).to_bytes(4, "little") for one in (before, after))
    (tmp_path / "bad.pt").write_bytes(changed.replace(was, now))
    with pytest.raises(CorruptError, match="cannot have") as raised:
        dequantised(open_checkpoint(tmp_path / "bad.pt"), DTYPES["bfloat16"])
    assert raised.value.kind == "scale-shape"


def test_another_subclass_is_refused(tmp_path: Path) -> None:
    """A cast would leave its codes as they are, and say that all is well."""
    source = DATA / "optimizers" / "torchao_int8.pt"
    with pytest.raises(UnsupportedError, match="qdata are codes"):
        api.convert(str(source), str(tmp_path / "out"), to="safetensors", dtype="bf16")
