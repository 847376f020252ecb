"""The tensor digest: one for any tiling in any order, another for any other content."""

from __future__ import annotations

import struct
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.digests.tensors import TensorDigest
from ftckpt.errors import UnsupportedError

MASK = (1 << 64) - 1


def defined(dtype: str, shape: tuple[int, ...], words: list[int]) -> str:
    """Return the digest as docs/tensor-digest.md defines it, in plain integers."""
    s1 = s2 = 0
    for place, word in enumerate(words):
        x = word ^ ((place + 1) * 0x9E3779B97F4A7C15 & MASK)
        x ^= x >> 32
        x = x * 0xE9846AF9B1A615D & MASK
        x ^= x >> 32
        x = x * 0xE9846AF9B1A615D & MASK
        x ^= x >> 28
        s1 = (s1 + x) & MASK
        s2 = (s2 + x * x) & MASK
    head = f"{dtype}[{','.join(map(str, shape))}]".encode()
    return str(xxhash.xxh3_128_hexdigest(head + struct.pack("<QQ", s1, s2)))


def whole(dtype: str, shape: tuple[int, ...], data: bytes) -> str:
    digest = TensorDigest(DTYPES[dtype], shape)
    digest.update(Box.whole(shape), data)
    assert digest.complete
    return digest.hexdigest()


# The vectors of docs/tensor-digest.md.
VECTORS = [
    ("float32", (3,), struct.pack("<3f", 1, 2, 3)),
    ("float32", (3, 1), struct.pack("<3f", 1, 2, 3)),
    ("bfloat16", (2, 2), bytes.fromhex("803f 0040 4040 8040")),
    ("int64", (), struct.pack("<q", -1)),
    ("float32", (0, 5), b""),
    ("complex128", (1,), struct.pack("<2d", 1, -1)),
    ("float4_e2m1", (4,), bytes.fromhex("21 43")),
]


@pytest.mark.parametrize(("dtype", "shape", "data"), VECTORS)
def test_the_definition(dtype: str, shape: tuple[int, ...], data: bytes) -> None:
    width = min(DTYPES[dtype].itemsize or 1, 8)
    words = [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]
    assert whole(dtype, shape, data) == defined(dtype, shape, words)


def test_the_documented_vectors() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tensor-digest.md").read_text()
    for dtype, shape, data in VECTORS:
        name = f"{dtype}[{','.join(map(str, shape))}]"
        assert f"| `{name}` | `{data.hex()}` | `{whole(dtype, shape, data)}` |" in page


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Box, int, int]]]:
    """Draw a shape, and boxes with ranges of their C order that hold every element once."""
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.sizes[axis]))
        for begin, size in ((0, cut), (cut, box.sizes[axis] - cut)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis] += begin
            sizes[axis] = size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    parts = []
    for box in boxes:
        cuts = draw(st.lists(st.integers(0, box.volume), max_size=2))
        edges = sorted({0, box.volume, *cuts})
        parts += [(box, a, b) for a, b in pairwise(edges)]
    return shape, draw(st.permutations(parts))


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64", "complex128"])
@given(tiling=tilings(), seed=st.integers(0, 2**32))
def test_any_tiling_in_any_order(
    dtype: str, tiling: tuple[tuple[int, ...], list[tuple[Box, int, int]]], seed: int
) -> None:
    shape, parts = tiling
    size = DTYPES[dtype].itemsize
    data = np.random.default_rng(seed).bytes(prod(shape) * size)
    array: Any = np.frombuffer(data, f"V{size}").reshape(shape)
    halves = [TensorDigest(DTYPES[dtype], shape) for _ in range(2)]
    for number, (box, begin, end) in enumerate(parts):
        region = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        dense = array[region].tobytes()
        halves[number % 2].update(box, dense[begin * size : end * size], begin)
    halves[0].merge(halves[1])
    assert halves[0].complete
    assert halves[0].hexdigest() == whole(dtype, shape, data)


@given(st.lists(st.integers(0, 2**16 - 1), min_size=2, max_size=40), st.data())
def test_a_swap_is_seen(values: list[int], data: st.DataObject) -> None:
    i, j = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    other = list(values)
    other[i], other[j] = other[j], other[i]
    one, two = (
        whole("bfloat16", (len(v),), struct.pack(f"<{len(v)}H", *v)) for v in (values, other)
    )
    assert (one == two) == (values == other)


@given(st.binary(min_size=8, max_size=80), st.integers(0), st.integers(0, 7))
def test_a_flipped_bit_is_seen(data: bytes, place: int, bit: int) -> None:
    data = data[: len(data) // 4 * 4]
    other = bytearray(data)
    other[place % len(data)] ^= 1 << bit
    shape = (len(data) // 4,)
    assert whole("float32", shape, data) != whole("float32", shape, bytes(other))


def test_long_runs_and_rows_longer_than_a_chunk() -> None:
    shape = (3, 140_001)
    array = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    digest = TensorDigest(DTYPES["float32"], shape)
    for begin, end in ((5_000, 140_001), (0, 5_000)):
        box = Box((0, begin), (3, end - begin))
        digest.update(box, array[:, begin:end].tobytes())
    assert digest.hexdigest() == whole("float32", shape, array.tobytes())


def test_shape_and_type_count() -> None:
    data = bytes(range(16))
    digests = {
        whole("float32", (4,), data),
        whole("float32", (2, 2), data),
        whole("int32", (4,), data),
        whole("bfloat16", (8,), data),
    }
    assert len(digests) == 4


def test_an_unfinished_digest_says_so() -> None:
    digest = TensorDigest(DTYPES["uint8"], (4,))
    digest.update(Box((0,), (3,)), b"abc")
    assert not digest.complete


def test_what_does_not_fit_is_refused() -> None:
    digest = TensorDigest(DTYPES["uint8"], (4,))
    with pytest.raises(ValueError, match="do not fit"):
        digest.update(Box((0,), (3,)), b"abc", 1)
    with pytest.raises(ValueError, match="different"):
        digest.merge(TensorDigest(DTYPES["uint8"], (5,)))
    packed = TensorDigest(DTYPES["float4_e2m1"], (4,))
    for box, data, start in (((2,), b"a", 0), ((4,), b"a", 1), ((4,), b"ab", 2)):
        with pytest.raises(UnsupportedError):
            packed.update(Box((0,), box), data, start)


def test_packed_elements_are_digested_by_whole_bytes_in_any_order() -> None:
    dtype, data = DTYPES["float4_e2m1"], bytes.fromhex("21 43 05")
    whole, parts = TensorDigest(dtype, (5,)), TensorDigest(dtype, (5,))
    whole.update(Box((0,), (5,)), data)
    parts.update(Box((0,), (5,)), data[1:], 2)
    assert not parts.complete
    parts.update(Box((0,), (5,)), data[:1])
    assert parts.complete
    assert parts.hexdigest() == whole.hexdigest()
