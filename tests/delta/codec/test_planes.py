"""Words cut into planes and put together again: of every width, in as few passes as it takes."""

from __future__ import annotations

import weakref
from itertools import product
from typing import Any

import numpy as np
import pytest

from ftckpt.checkpoint import Kind
from ftckpt.delta import Form, Reference
from ftckpt.delta.codec import choose_encoding, words
from ftckpt.delta.codec.choose_encoding import BlockChoice, decode_block, encode_block
from ftckpt.delta.codec.planes import CHUNK, JOINED, Planes
from ftckpt.delta.codec.predict import SCALED, predict
from ftckpt.delta.codec.words import WORDS, scratch
from ftckpt.workers import buffers
from tests.delta.packing import State, bf16, pack

CASES = [(size, joined) for size, joined in product((1, 2, 4, 8), JOINED) if joined < size]


def numbers(count: int, size: int, bits: int | None = None) -> Any:
    """Return words of small numbers, which planes shrink, with all bits or the lowest ones."""
    rng = np.random.default_rng(size)
    found = rng.geometric(0.2, count).astype(f"<u{size}")
    top = found << np.uint64(8 * size - 4) if bits is None else found
    mixed = (found | top).astype(f"<u{size}")
    return mixed if bits is None else mixed & np.array((1 << bits) - 1, mixed.dtype)


@pytest.mark.parametrize(("size", "joined"), CASES)
def test_rotated_words_are_cut_and_never_made(
    monkeypatch: pytest.MonkeyPatch, size: int, joined: int
) -> None:
    values = numbers(CHUNK + 3000, size)
    turned = words.rotate(values, np.empty_like(values))
    expected = bytes(encode_block(turned, None, BlockChoice(Form.PLANES, Planes(joined))).payload)
    monkeypatch.setattr(words, "rotate", None)
    form, payload = encode_block(values, None, BlockChoice(Form.ROTATED, Planes(joined)))
    assert (form, bytes(payload)) == (Form.ROTATED, expected)
    out = np.empty_like(values)
    decode_block(form, memoryview(bytes(payload)), None, out)
    assert np.array_equal(out, values)


@pytest.mark.parametrize(("size", "joined"), CASES)
def test_planes_of_zeros_are_left_out_wherever_they_are(size: int, joined: int) -> None:
    count = 3000
    for kept in [*product((0, 1), repeat=size)][:: 1 if size < 8 else 11]:
        mask = int.from_bytes(bytes(255 * each for each in kept), "little")
        values = numbers(count, size) & np.array(mask, f"<u{size}")
        form, payload = encode_block(values, None, BlockChoice(Form.PLANES, Planes(joined)))
        out = np.full_like(values, 7)
        decode_block(form, memoryview(bytes(payload)), None, out)
        assert np.array_equal(out, values)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 4096, 4097, 9001])
def test_blocks_are_equal_to_their_last_byte(size: int, count: int) -> None:
    values = numbers(count, size)
    assert choose_encoding._equal(values, values.copy())
    for place in {0, count // 2, count - 1}:
        other = values.copy()
        other[place] ^= 1
        assert not choose_encoding._equal(values, other)


def test_what_is_as_the_base_is_read_into_its_place() -> None:
    base = State()
    base.add("w", "float32", (5000,), numbers(5000, 4))
    packed = pack(base, base)
    assert [block.form for block in packed.blocks] == [Form.EXACT]
    out = bytearray(20000)
    given = []

    def fill(key: str, offset: int, view: memoryview) -> None:
        given.append(np.frombuffer(view, "u1").__array_interface__["data"][0])
        base.fill(key, offset, view)

    packed.decoder(fill).fill("w", 0, memoryview(out))
    assert given == [np.frombuffer(out, "u1").__array_interface__["data"][0]]
    assert bytes(out) == base.data["w"]


def test_what_is_as_predicted_is_computed_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State()
    master = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    state.add("w", "float32", (5000,), master, Kind.MASTER)
    state.add("w", "bfloat16", (5000,), bf16(master))
    packed = pack(state)
    (derived,) = (block for block in packed.blocks if block.reference is Reference.PREDICTION)
    assert derived.form is Form.EXACT
    monkeypatch.setattr("ftckpt.delta.codec.decode.scratch", None)
    assert packed.unpack() == state.data


def test_what_was_certain_is_not_watched_again() -> None:
    given = np.full(10, np.nan, np.float32).view("<u4")
    assert not predict(SCALED, [given], (1.0,), np.empty_like(given))
    assert predict(SCALED, [given], (1.0,), np.empty_like(given), watch=False)


def test_scratch_is_found_again_and_given_up_when_more_is_needed() -> None:
    one = scratch(1000, 4, WORDS)
    assert scratch(1000, 4, WORDS) is one
    assert scratch(2000, 2, WORDS).dtype == np.uint16
    held: Any = buffers.buffer(0, WORDS).obj
    memory = weakref.ref(held)
    scratch(len(held) + 1, 1, WORDS)
    del one, held
    assert memory() is None
