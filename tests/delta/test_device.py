"""A device cuts blocks to the same bytes as the processor."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.delta.blocks import BLOCK, Choice, Form, decode_block, encode_block
from ftckpt.delta.device import Device, device_named
from ftckpt.delta.planes import CHUNK, JOINED, Planes
from ftckpt.errors import NoResourceError, UsageError

pytest.importorskip("torch")

CUT = (Form.PLANES, Form.ROTATED, Form.DIFFERENCE, Form.XOR)


def words(size: int, count: int, seed: int) -> tuple[Any, Any]:
    """Words of which the upper bytes can be coded, and others near them."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(f"<u{size}")
    before = np.frombuffer(bytearray(rng.bytes(size * count)), dtype)
    before.view("u1").reshape(-1, size)[:, -1] &= 3
    after = before + rng.integers(0, 200, count).astype(dtype) - dtype.type(100)
    after[::7] = before[::7]
    return before, after


def assert_same(device: Device, size: int, count: int, form: Form, how: Planes, seed: int) -> None:
    before, after = words(size, count, seed)
    reference = None if form in (Form.PLANES, Form.ROTATED) else before
    choice = Choice(form, how)
    form, payload = encode_block(after, reference, choice, device)
    payload = bytes(payload)  # the next block takes its memory
    assert (form, payload) == encode_block(after, reference, choice)
    out = np.empty_like(after)
    decode_block(form, memoryview(payload), reference, out)
    assert np.array_equal(out, after)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 3000),
    st.sampled_from(CUT),
    st.sampled_from(JOINED),
    st.sets(st.integers(0, 7)),
    st.integers(0, 5),
)
def test_every_form_and_word(
    size: int, count: int, form: Form, joined: int, plain: set[int], seed: int
) -> None:
    how = Planes(joined if joined < size else 0, frozenset(plain))
    assert_same(Device("cpu"), size, count, form, how, seed)


@pytest.mark.parametrize("form", CUT)
def test_many_chunks(form: Form) -> None:
    assert_same(Device("cpu"), 4, 2 * CHUNK + 77, form, Planes(2, frozenset({2})), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("form", CUT)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_cuda(size: int, form: Form) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for joined in JOINED:
        how = Planes(joined if joined < size else 0)
        assert_same(Device("cuda"), size, BLOCK - 5, form, how, 1)


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert device_named("cpu") is None
    assert (device_named("auto") is None) != torch.cuda.is_available()
    with pytest.raises(UsageError, match="is no device"):
        device_named("abacus")
    with pytest.raises(NoResourceError, match="there is no cuda:99 here"):
        device_named("cuda:99")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert device_named("auto") is None
    with pytest.raises(NoResourceError, match="not installed"):
        device_named("cuda")
