"""Casts by numpy against torch's own: the same numbers to the bit, and one spelling of NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ftckpt.checkpoint import Box
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import raw_dtype
from ftckpt.transfer.casting import cast, changes
from ftckpt.transfer.device import _items
from ftckpt.transfer.read.copies_plan import ElementMove, StoredBox
from ftckpt.verification.values.masters import cast_master

FLOATS = ("float64", "float32", "float16", "bfloat16")
OTHERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
EDGES = [
    0.0, -0.0, 1.0, 65519.99, 65520.0, 65504.0, -65520.0, 3.3895314e38, 3.3961775e38, 3.4e38,
    1.00390625, 1.01171875, 5.96e-8, 2.98e-8, 2.9802322387695312e-08, 1e-45,
    9.2e-41, np.inf, -np.inf,
]  # fmt: skip


def drawn(name: str) -> np.ndarray:
    """Return raw items of a type: every word of 16 bits and less, many of the others."""
    dtype = DTYPES[name]
    raw = raw_dtype(dtype.itemsize)
    if name == "bool":
        return np.array([0, 1, 1, 0], raw)
    if dtype.bits <= 16:
        return np.arange(1 << dtype.bits, dtype=np.uint64).astype(raw)
    random = np.random.default_rng(7)
    if dtype.family != "float":
        return random.integers(-(2**31), 2**31, 5000).astype(dtype.numpy).view(raw)
    edges = np.array(EDGES).astype(dtype.numpy).view(raw)
    words = random.integers(0, 2**dtype.bits, 200_000, dtype=np.uint64).astype(raw)
    near = random.normal(size=100_000).astype(dtype.numpy).view(raw)
    return np.concatenate([edges, words, near])


def by_torch(items: np.ndarray, source: str, target: str) -> np.ndarray:
    held = torch.from_numpy(items.view(np.uint8)).view(getattr(torch, source))
    done = held.to(getattr(torch, target)).view(torch.uint8).numpy()
    return done.view(raw_dtype(DTYPES[target].itemsize))


def nans(items: np.ndarray, name: str) -> np.ndarray:
    if name not in FLOATS:
        return np.zeros(items.size, bool)
    held = torch.from_numpy(items.view(np.uint8)).view(getattr(torch, name))
    return held.isnan().numpy()


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", [*FLOATS, *OTHERS])
def test_every_number_is_torchs(source: str, target: str) -> None:
    items = drawn(source)
    ours = cast(items, DTYPES[source], DTYPES[target])
    theirs = by_torch(items, source, target)
    numbers = ~nans(items, source)
    assert np.array_equal(ours[numbers], theirs[numbers])
    assert np.array_equal(nans(ours, target), nans(items, source))


@pytest.mark.parametrize("target", OTHERS)
@pytest.mark.parametrize("source", ["float32", "bfloat16", "int64", "uint8", "bool"])
def test_whole_numbers_and_truth_are_torchs(source: str, target: str) -> None:
    dtype = DTYPES[source]
    values = np.array([0, 1, 2, 100, 127], np.float32)
    items = (
        (values.view(np.uint32) >> 16).astype(np.uint16)
        if source == "bfloat16"
        else values.astype(dtype.numpy).view(raw_dtype(dtype.itemsize))
    )
    ours = cast(items, dtype, DTYPES[target])
    assert np.array_equal(ours, by_torch(items, source, target))


@pytest.mark.parametrize(("target", "words"), [
    ("bfloat16", [0x7FC0, 0x7FC0, 0xFFFF, 0x7FFF, 0xFFC1]),
    ("float16", [0x7E00, 0x7E00, 0xFFFF, 0x7FFF, 0xFE09]),
])  # fmt: skip
def test_a_nan_keeps_its_sign_and_payload_wherever_it_is_cast(
    target: str, words: list[int]
) -> None:
    """On a processor, on a device, and where `verify` casts a master copy: else proofs differ."""
    bits = [0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0xFFC12345]
    items = np.array(bits, np.uint32)
    source, dtype = DTYPES["float32"], DTYPES[target]
    assert cast(items, source, dtype).tolist() == words
    assert cast_master(items.view(np.float32), dtype).tolist() == words  # type: ignore[union-attr]
    many = np.repeat(items, 20)
    assert cast(many, source, dtype).tolist() == np.repeat(words, 20).tolist()
    file = StoredBox(Box.whole((5,)), "f", 0, (4,))
    move = ElementMove(file, 0, 20, 0, 5, sizes=(5,), strides=(4,), steps=(1,), dtype=source)
    sent = torch.from_numpy(items.view(np.uint8))
    assert (_items(sent, 0, move, dtype).numpy().view(np.uint16)).tolist() == words


def test_what_a_cast_did_is_counted() -> None:
    values = np.array([1.0, 1.00390625, 7e4, np.inf, np.nan], np.float32).view(np.uint32)
    half = cast(values, DTYPES["float32"], DTYPES["float16"])
    assert changes(values, DTYPES["float32"], half, DTYPES["float16"]) == (5, 1, 1)
    assert changes(values, DTYPES["float32"], values, DTYPES["float32"]) == (5, 0, 0)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_floats_are_cast_by_torch(name: str) -> None:
    items = drawn(name)
    single = cast(items, DTYPES[name], DTYPES["float32"])
    assert np.array_equal(single, by_torch(items, name, "float32"))
    assert np.array_equal(
        cast(single, DTYPES["float32"], DTYPES[name]), by_torch(single, "float32", name)
    )
    assert changes(items, DTYPES[name], single, DTYPES["float32"]).changed == 0
