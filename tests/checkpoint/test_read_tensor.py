"""Logical tensors come together from any boxes and ranges, and never from incomplete ones."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint import Box, Checkpoint, Extent, Kind, Piece, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import read_box, read_tensor, slabs
from ftckpt.errors import CorruptError, FtckptError
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from tests.checkpoint.test_coverage import TILINGS, slices

TYPES = st.sampled_from(["uint8", "bfloat16", "float32", "int64", "complex128"])


class Loose(Checkpoint):
    """A checkpoint of one file, whose pieces a test lays down."""

    format = "loose"

    def members(self) -> Iterable[str]:
        return ("data",)

    def load_object(self, name: str) -> Any:
        raise KeyError(name)


def laid(shape: tuple[int, ...], dtype: str, pieces: list[Piece], data: bytes) -> Loose:
    store = open_store("memory://assembly")
    store.put("data", data)
    info = TensorInfo("model", "w", Kind.PARAM, shape, DTYPES[dtype], pieces)
    return Loose(source=Source.directory(store), tensors={"w": info}, objects={})


def cut(
    shape: tuple[int, ...], dtype: str, boxes: list[Box], choose: random.Random
) -> tuple[bytes, Loose]:
    """Fill a tensor, cut it into the boxes, some of them into ranges, some of them strided."""
    itemsize = DTYPES[dtype].itemsize
    whole = np.frombuffer(choose.randbytes(int(np.prod(shape)) * itemsize), f"V{itemsize}")
    whole = whole.reshape(shape)
    pieces, out = [], bytearray()
    for box in boxes:
        part = whole[slices(box)]
        how = choose.choice(["dense", "flat", "strided"])
        out += choose.randbytes(choose.randrange(9))
        if how == "flat" and box.volume:
            line = part.reshape(-1)
            edges = sorted([0, box.volume, choose.randint(0, box.volume)])
            for start, stop in pairwise(edges):
                extent = Extent("data", len(out), (stop - start) * itemsize)
                pieces.append(Piece(box, extent, flat=(start, stop)))
                out += line[start:stop].tobytes()
        elif how == "strided" and box.volume:
            axes = list(range(part.ndim))
            choose.shuffle(axes)
            stored = np.ascontiguousarray(part.transpose(axes))
            strides = [0] * part.ndim
            for place, axis in enumerate(axes):
                strides[axis] = stored.strides[place] // itemsize
            pieces.append(
                Piece(box, Extent("data", len(out), stored.nbytes), strides=tuple(strides))
            )
            out += stored.tobytes()
        else:
            pieces.append(Piece(box, Extent("data", len(out), part.nbytes)))
            out += part.tobytes()
    choose.shuffle(pieces)
    return whole.tobytes(), laid(shape, dtype, pieces, bytes(out))


@given(TILINGS, TYPES, st.randoms(use_true_random=False))
def test_any_partition_reads_back(
    tiling: tuple[tuple[int, ...], list[Box]], dtype: str, choose: random.Random
) -> None:
    whole, checkpoint = cut(tiling[0], dtype, tiling[1], choose)
    assert read_tensor(checkpoint, "w") == whole


@given(TILINGS, TYPES, st.randoms(use_true_random=False))
def test_any_box_of_it_reads_back(
    tiling: tuple[tuple[int, ...], list[Box]], dtype: str, choose: random.Random
) -> None:
    shape, boxes = tiling
    whole, checkpoint = cut(shape, dtype, boxes, choose)
    offsets = tuple(choose.randint(0, n) for n in shape)
    sizes = tuple(choose.randint(0, n - o) for n, o in zip(shape, offsets, strict=True))
    full = np.frombuffer(whole, f"V{DTYPES[dtype].itemsize}").reshape(shape)
    want = full[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    got = read_box(checkpoint, checkpoint.tensors["w"], Box(offsets, sizes))
    assert got.tobytes() == want.tobytes()


@given(TILINGS, st.randoms(use_true_random=False))
def test_a_piece_that_is_missing_is_never_filled_with_something(
    tiling: tuple[tuple[int, ...], list[Box]], choose: random.Random
) -> None:
    shape, boxes = tiling
    if not any(box.volume for box in boxes):
        return
    _, checkpoint = cut(shape, "float32", boxes, choose)
    info = checkpoint.tensors["w"]
    pieces = list(info.pieces)
    held = [p for p in pieces if (p.box.volume if p.flat is None else p.flat[1] - p.flat[0])]
    pieces.remove(choose.choice(held))
    short = laid(shape, "float32", pieces, checkpoint.source.read("data"))
    with pytest.raises(CorruptError) as caught:
        read_tensor(short, "w")
    assert (caught.value.kind, caught.value.tensor) == ("hole", "w")


def test_an_overlap_does_not_make_up_for_a_hole() -> None:
    twice = Piece(Box((0,), (2,)), Extent("data", 0, 8))
    checkpoint = laid((4,), "float32", [twice, twice], bytes(8))
    with pytest.raises(CorruptError) as caught:
        read_tensor(checkpoint, "w")
    assert caught.value.kind == "overlap"


@pytest.mark.parametrize("length", [0, 12, 20])
def test_a_piece_of_the_wrong_length(length: int) -> None:
    checkpoint = laid(
        (4,), "float32", [Piece(Box((0,), (4,)), Extent("data", 0, length))], bytes(20)
    )
    with pytest.raises(FtckptError) as caught:
        read_tensor(checkpoint, "w")
    assert caught.value.kind == "size-mismatch"


def test_strides_of_another_number_of_axes() -> None:
    odd = Piece(Box((0, 0), (2, 2)), Extent("data", 0, 16), strides=(1,))
    with pytest.raises(CorruptError):
        read_tensor(laid((2, 2), "float32", [odd], bytes(16)), "w")


def test_replicas_are_not_read() -> None:
    main = Piece(Box((0,), (2,)), Extent("data", 0, 8))
    copy = Piece(Box((0,), (2,)), Extent("data", 8, 8), replica=1)
    checkpoint = laid((2,), "float32", [copy, main], b"mainmaincopycopy")
    assert read_tensor(checkpoint, "w") == b"mainmain"


@given(data=st.data())
def test_slabs_tile_their_box_in_order(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(0, 6), max_size=4)))
    box = Box(tuple(3 for _ in sizes), sizes)
    limit = data.draw(st.integers(1, 200))
    cut = list(slabs(box, limit, 4))
    assert sum(slab.volume for slab in cut) == (box.volume if box.volume else 0)
    numbers = np.arange(box.volume).reshape(sizes)
    order = [
        numbers[tuple(slice(o - 3, o - 3 + n) for o, n in zip(*slab, strict=True))].ravel()
        for slab in cut
    ]
    assert [int(n) for part in order for n in part] == list(range(box.volume if box.volume else 0))
    smallest = 4 * (sizes[-1] if sizes else 1)
    assert all(slab.volume * 4 <= max(limit, 4) or slab.volume * 4 <= smallest for slab in cut)


def test_a_slab_of_a_large_piece_reads_the_slab(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    import ftckpt

    values = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    save_file({"w": values}, tmp_path / "w.safetensors")
    checkpoint = ftckpt.open_checkpoint(str(tmp_path / "w.safetensors"))
    before = checkpoint.source.store.usage().bytes_read
    box = Box((1000, 10), (3, 5))
    read = read_box(checkpoint, checkpoint.tensors["w"], box)
    assert (read.view(np.float32) == values[1000:1003, 10:15]).all()
    assert checkpoint.source.store.usage().bytes_read - before < 10_000
