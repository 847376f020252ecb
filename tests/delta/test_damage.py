"""Damaged and hostile payloads: a named error, or the right bytes; never others, never a bomb."""

from __future__ import annotations

import struct
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import Kind
from ftckpt.delta import BLOCK, FitSettings, Form, Rows
from ftckpt.delta.codec.choose_encoding import BlockChoice, decode_block, encode_block
from ftckpt.delta.codec.planes import CHUNK
from ftckpt.errors import CorruptError
from tests.campaign import examples
from tests.delta.packing import Packed, State, pack, trained

SETTINGS = FitSettings(0.9, 0.95, 1e-8, 1e-3, 0.1, 2, 1)
NEEDS = [form for form in Form if form not in (Form.PLAIN, Form.PLANES, Form.ROTATED)]


def states() -> tuple[State, State]:
    base, target = trained(size=(50, 40))
    rng = np.random.default_rng(1)
    values = rng.standard_normal(3000).astype(np.float32)
    for state in (base, target):
        state.add("sparse", "float32", values.shape, values)
        state.add("half", "float32", values.shape, values)
        values = values.copy()
        values[::20] += 1
    return base, target


def damaged(packed: Packed, place: int, bit: int) -> Packed:
    data = bytearray(packed.files["00000.blocks"])
    data[place] ^= 1 << bit
    return replace(packed, files={"00000.blocks": bytes(data)})


def resealed(packed: Packed) -> Packed:
    """Make the index agree with the payloads as they are, but not with the elements."""
    index = packed.index
    rows = Rows([tensor.blocks for tensor in index.tensors])
    for number, tensor in enumerate(index.tensors):
        for block, stored in enumerate(index.blocks_of(tensor)):
            payload = packed.read("00000.blocks", stored.offset, stored.length)
            rows.put(number, block, stored._replace(stored=xxhash.xxh3_64_digest(payload)))
    return replace(packed, index=replace(index, rows=rows.dump()))


def test_every_damaged_byte_of_a_payload_is_located() -> None:
    base, target = states()
    packed = pack(target, base, settings=SETTINGS)
    places = [
        (tensor.key, block)
        for tensor in packed.index.tensors
        for block in packed.index.blocks_of(tensor)
        if block.length
    ]
    assert {b.form for _, b in places} > {Form.ROTATED, Form.GAPS}
    for key, block in places:
        step = max(1, block.length // 40)
        for place in range(block.offset, block.offset + block.length, step):
            with pytest.raises(CorruptError) as caught:
                damaged(packed, place, place % 8).unpack(base.fill)
            # A tensor that is predicted from the damaged one may have been asked for first.
            assert caught.value.kind == "bad-digest"
            assert (caught.value.offset, caught.value.length) == (block.offset, block.length)
            assert (caught.value.file, caught.value.tensor) == ("00000.blocks", key)


def test_a_payload_that_was_changed_on_purpose_never_gives_other_elements() -> None:
    base, target = states()
    packed = pack(target, base, settings=SETTINGS)
    seen = Counter(
        unpacked_or_kind(resealed(damaged(packed, place, place % 8)), base, target)
        for place in range(0, packed.nbytes, 17)
    )
    assert set(seen) <= {"bad-delta", "wrong-base", "same"}
    assert seen["same"] <= 2  # a bit in the head of every zstd frame means nothing


def unpacked_or_kind(packed: Packed, base: State, target: State) -> str:
    try:
        return "same" if packed.unpack(base.fill) == target.data else "other elements"
    except CorruptError as error:
        return error.kind


def test_a_file_that_ends_early() -> None:
    base, target = states()
    packed = pack(target, base, settings=SETTINGS)
    cut = replace(packed, files={"00000.blocks": packed.files["00000.blocks"][:-1]})
    with pytest.raises(CorruptError):
        cut.unpack(base.fill)


def kind_of_failure(form: Form, payload: bytes, reference: Any, out: Any) -> str:
    try:
        decode_block(form, memoryview(payload), reference, out)
    except CorruptError as error:
        return error.kind
    return ""


@settings(max_examples=examples(75, 1200), deadline=None)
@given(
    st.sampled_from(list(Form)),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 400),
    st.binary(max_size=200),
)
def test_a_payload_may_be_anything(form: Form, size: int, count: int, payload: bytes) -> None:
    reference = np.zeros(count, f"<u{size}") if form in NEEDS else None
    out = np.empty(count, f"<u{size}")
    assert kind_of_failure(form, payload, reference, out) in ("", "bad-delta")


@settings(max_examples=examples(75, 1200), deadline=None)
@given(
    st.sampled_from([f for f in Form if f not in (Form.EXACT, Form.PLAIN)]),
    st.sampled_from([1, 2, 4, 8]),
    st.data(),
)
def test_a_real_payload_with_changed_bytes(form: Form, size: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(size)
    reference = rng.integers(0, 50, 600).astype(f"<u{size}")
    values = reference.copy()
    values[::7] += 1
    encoded = encode_block(values, None if form not in NEEDS else reference, BlockChoice(form))
    assert encoded.form is form
    payload = bytearray(encoded.payload)
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    out = np.empty_like(values)
    against = None if form not in NEEDS else reference
    assert kind_of_failure(form, bytes(payload), against, out) in ("", "bad-delta")
    for end in range(0, len(encoded.payload), 5):
        with pytest.raises(CorruptError):
            decode_block(form, memoryview(encoded.payload)[:end], reference, out)


def peak_of(form: Form, payload: bytes, count: int) -> int:
    """Return how much memory the refusal of a payload takes."""
    reference, out = (np.zeros(count, np.uint32) for _ in range(2))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError):
            decode_block(form, memoryview(payload), reference, out)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_bombs_are_refused_before_they_unfold() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(256 << 20))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    count = 50000
    for frame in (bomb, unsized, bomb + bomb):
        planes = b"\0" + struct.pack("<4I", len(frame), 0, 0, 0) + frame
        gaps = struct.pack("<III", 1, 200, len(frame)) + frame
        mask = struct.pack("<III", 1, count // 8, len(frame)) + frame
        assert peak_of(Form.PLANES, planes, count) < 1 << 20
        assert peak_of(Form.GAPS, gaps, count) < 1 << 20
        assert peak_of(Form.MASK, mask, count) < 1 << 20
    claims = struct.pack("<III", 1 << 31, 1 << 31, 1 << 31)
    assert peak_of(Form.GAPS, claims + bytes(100), count) < 1 << 20


def test_lengths_that_do_not_add_up() -> None:
    count = CHUNK + 5
    out = np.empty(count, np.uint16)
    head = b"\0" + struct.pack("<4I", CHUNK, 0, 5, 0)
    good = head + bytes(CHUNK) + bytes(5)
    decode_block(Form.PLANES, memoryview(good), None, out)
    lies: list[Any] = [
        good + b"\0",
        b"\1" + good[1:],
        b"\2" + good[1:],
        b"\0" + struct.pack("<4I", CHUNK + 1, 0, 4, 0) + bytes(CHUNK + 5),
        b"\0" + struct.pack("<4I", CHUNK, 0, 6, 0) + bytes(CHUNK + 6),
    ]
    for payload in lies:
        with pytest.raises(CorruptError):
            decode_block(Form.PLANES, memoryview(payload), None, out)


def test_a_state_that_ends_in_the_middle_of_a_block() -> None:
    target = State()
    target.add("w", "uint8", (BLOCK + 3,), bytes(BLOCK) + b"abc")
    target.add("w", "float32", (0, 7), b"", Kind.EXP_AVG)
    packed = pack(target)
    assert [b.nbytes for b in packed.blocks] == [BLOCK, 3]
    assert packed.unpack() == target.data
