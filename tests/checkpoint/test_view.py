"""An open checkpoint as a mapping of its tensors, and what its repr says."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ftckpt
from ftckpt.checkpoint import Box, Checkpoint, Extent, Kind, Piece, TensorInfo, Topology
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.errors import CorruptError, ExitCode, FtckptError, NoSuchTensorError, UnsupportedError
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from tests.builders.checkpoints import save_dcp


class OneFile(Checkpoint):
    """Tensors that lie in one file in memory, one behind the other."""

    format = "one"

    def members(self) -> Iterable[str]:
        return ("data",)

    def load_object(self, name: str) -> Any:
        raise KeyError(name)


def holding(shapes: dict[str, tuple[str, tuple[int, ...], bytes]]) -> OneFile:
    store = open_store("memory://view")
    tensors, data = {}, b""
    for name, (dtype, shape, held) in shapes.items():
        piece = Piece(Box.whole(shape), Extent("data", len(data), len(held)))
        tensors[name] = TensorInfo("model", name, Kind.PARAM, shape, DTYPES[dtype], [piece])
        data += held
    store.put("data", data)
    return OneFile(source=Source.directory(store), tensors=tensors, objects={})


def test_a_checkpoint_is_a_mapping(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-7")
    checkpoint = ftckpt.open(f"{tmp_path}/step-7")
    assert issubclass(type(checkpoint), Mapping)
    assert list(checkpoint) == list(checkpoint.keys()) == list(checkpoint.tensors)
    assert len(checkpoint) == 4
    assert "layers.0.weight" in checkpoint
    assert "layers.9.weight" not in checkpoint
    assert checkpoint.get("layers.9.weight") is None
    assert {name: view.shape for name, view in checkpoint.items()} == {
        name: info.shape for name, info in checkpoint.tensors.items()
    }
    view = checkpoint["layers.0.weight"]
    assert (view.name, view.shape, view.dtype) == ("layers.0.weight", (64, 33), "float32")
    assert view.nbytes == 64 * 33 * 4
    assert repr(view) == "<layers.0.weight: float32 (64, 33), 8.2 KiB>"
    torch.manual_seed(0)  # as the builder does
    expected = torch.randn(64, 33)
    assert torch.equal(view.torch(), expected)
    np.testing.assert_array_equal(np.asarray(view), expected.numpy())


def test_a_missing_name_is_a_key_error_that_names_the_near_ones(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-7")
    checkpoint = ftckpt.open(f"{tmp_path}/step-7")
    with pytest.raises(KeyError, match=r"did you mean layers\.0\.weight") as caught:
        checkpoint["layers.0.wieght"]
    error = caught.value
    assert isinstance(error, FtckptError)
    assert isinstance(error, NoSuchTensorError)
    assert (error.exit_code, error.tensor) == (ExitCode.NOT_FOUND, "layers.0.wieght")
    assert str(error).startswith(f"{tmp_path}/step-7 has no tensor layers.0.wieght: did you mean")


INDEXES: list[Any] = [
    0, -1, slice(1, 3), slice(None), slice(-2, None), slice(3, 1), (0, 1), (slice(1, 2), -1), ...,
    (..., 0), (1, ..., slice(0, 2)), (slice(0, 2), slice(1, None), 2), (0, 0, 0), (0, 0, 0, ...),
]  # fmt: skip


@pytest.mark.parametrize("index", INDEXES, ids=repr)
def test_an_index_cuts_what_numpy_would(index: Any) -> None:
    whole = np.arange(4 * 3 * 5, dtype=np.int32).reshape(4, 3, 5)
    view = holding({"w": ("int32", (4, 3, 5), whole.tobytes())})["w"]
    cut = view[index]
    assert cut.shape == whole[index].shape
    np.testing.assert_array_equal(cut.numpy(), whole[index])
    assert torch.equal(cut.torch(), torch.from_numpy(whole)[index])


def test_cuts_of_cuts_and_iteration() -> None:
    whole = np.arange(4 * 3 * 5, dtype=np.int16).reshape(4, 3, 5)
    view = holding({"w": ("int16", (4, 3, 5), whole.tobytes())})["w"]
    np.testing.assert_array_equal(view[1:][:, 1][0:2, 2:].numpy(), whole[1:][:, 1][0:2, 2:])
    assert [len(view), *(row.shape for row in view)] == [4, *[(3, 5)] * 4]
    np.testing.assert_array_equal([row.numpy() for row in view], whole)
    with pytest.raises(TypeError):
        len(view[0, 0, 0])
    assert view[2:2]  # empty, and still a view


@pytest.mark.parametrize("index", [4, -5, (0, 0, 0, 0), slice(None, None, 2), "w", 1.0, None])
def test_what_is_no_box_is_refused(index: Any) -> None:
    view = holding({"w": ("int8", (4, 3, 5), bytes(60))})["w"]
    with pytest.raises(IndexError):
        view[index]


def test_a_slice_reads_its_own_bytes_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_dcp(tmp_path / "step-7")
    checkpoint = ftckpt.open(f"{tmp_path}/step-7")
    view = checkpoint["layers.0.weight"]
    read: list[int] = []
    true_open = Source.open

    def watched(self: Source, name: str, *args: Any, **kwargs: Any) -> Any:
        reader = true_open(self, name, *args, **kwargs)
        true_read = reader.read

        def counting(offset: int, length: int) -> bytes:
            read.append(length)
            return true_read(offset, length)

        monkeypatch.setattr(reader, "read", counting, raising=False)
        return reader

    monkeypatch.setattr(Source, "open", watched)
    assert view[2:4].numpy().shape == (2, 33)
    rows = sum(read)
    read.clear()
    view.numpy()
    whole = sum(read)
    # Both read the record's header; the rest is elements.
    assert whole - rows == (64 - 2) * 33 * 4


TYPES = ["float64", "float16", "bfloat16", "float8_e4m3fn", "bool", "uint8", "complex64",
         "complex128"]  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_torch_gets_every_plain_type(name: str) -> None:
    kind = getattr(torch, name)
    raw = random.Random(7).randbytes(6 * DTYPES[name].itemsize)
    raw = bytes(byte & 1 for byte in raw) if name == "bool" else raw
    checkpoint = holding({"w": (name, (2, 3), raw), "none": (name, (0, 3), b"")})
    found = checkpoint["w"].torch()
    assert (found.dtype, tuple(found.shape)) == (kind, (2, 3))
    assert bytes(found.reshape(-1).view(torch.uint8).numpy()) == raw
    assert tuple(checkpoint["none"].torch().shape) == (0, 3)
    if DTYPES[name].numpy:
        assert checkpoint["w"].numpy().tobytes() == raw
        found.reshape(-1)[0] = 0  # it is the reader's own
    else:
        with pytest.raises(UnsupportedError, match=f"numpy has no type {name}"):
            checkpoint["w"].numpy()


def test_types_that_torch_has_not_are_refused() -> None:
    checkpoint = holding({"w": ("float4_e2m1", (2, 2), b"\1\2")})
    assert checkpoint["w"].nbytes == 2
    with pytest.raises(UnsupportedError, match="no plain type"):
        checkpoint["w"].torch()


def test_a_hole_is_damage_and_no_element() -> None:
    checkpoint = holding({"w": ("int32", (4,), bytes(16))})
    (piece,) = checkpoint.tensors["w"].pieces
    short = piece._replace(box=Box((0,), (3,)), extent=Extent("data", 0, 12))
    holed = checkpoint.tensors["w"]._replace(pieces=[short])
    checkpoint.tensors = {"w": holed}
    with pytest.raises(CorruptError) as caught:
        checkpoint["w"][0].numpy()
    assert (caught.value.kind, caught.value.tensor) == ("hole", "w")


def test_the_repr_has_five_lines(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-7")
    checkpoint = ftckpt.open(f"{tmp_path}/step-7")
    assert repr(checkpoint).splitlines() == [
        f"format    dcp: {tmp_path}/step-7",
        "step      7",
        f"tensors   4, and {len(checkpoint.objects)} objects",
        "bytes     33.0 KiB: float32 33.0 KiB",
        "topology  1 rank",
    ]
    made = holding({"w": ("int8", (2,), b"ab"), "v": ("int8", (2,), b"ab")})
    made.topology = Topology(world_size=4, tp=2, pp=2)
    made.aliases = {"v": "w"}
    assert repr(made).splitlines()[1:] == [
        "step      not known",
        "tensors   1, 1 tied, and 0 objects",
        "bytes     2 B: int8 2 B",
        "topology  4 ranks, tp 2, pp 2",
    ]
    bare = holding({})
    assert (len(bare), bool(bare)) == (0, True)
    assert repr(bare).splitlines()[2:] == [
        "tensors   0, and 0 objects",
        "bytes     0 B",
        "topology  not recorded",
    ]
