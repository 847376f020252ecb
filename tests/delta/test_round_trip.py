"""What is packed comes back bit for bit, and by ranges."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import Kind
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.delta import BLOCK, DeltaDecoder, FitSettings, Form, Reference
from ftckpt.errors import CorruptError, UsageError
from tests.campaign import examples
from tests.delta.packing import State, bf16, pack, reparsed, trained

NAMES = sorted({dtype.name for dtype in DTYPES.values()})
SETTINGS = FitSettings(0.9, 0.95, 1e-8, 1e-3, 0.1, 2, 1)


def noise(nbytes: int, seed: int) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(nbytes))


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, tuple[int, ...], bytes, bytes]:
    """A type, a shape, and elements of two steps that differ in some bytes, or in all."""
    name = draw(st.sampled_from(NAMES))
    shape = draw(
        st.one_of(
            st.just(()),
            st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
            st.integers(500, 9000).map(lambda n: (n,)),
        )
    )
    nbytes = DTYPES[name].nbytes(prod(shape))
    before = noise(nbytes, draw(st.integers(0, 5)))
    if draw(st.booleans()):  # something that planes can shrink
        before[:: max(1, DTYPES[name].itemsize)] = bytes(
            len(before[:: max(1, DTYPES[name].itemsize)])
        )
    after = bytearray(before)
    if draw(st.booleans()):
        after = noise(nbytes, 6)
    elif nbytes:
        for place in draw(st.lists(st.integers(0, nbytes - 1), max_size=20)):
            after[place] = draw(st.integers(0, 255))
    return name, shape, bytes(before), bytes(after)


@settings(max_examples=examples(40, 480), deadline=None)
@given(tensors(), st.sampled_from([1, 2, 3]), st.booleans())
def test_every_type_and_shape(
    case: tuple[str, tuple[int, ...], bytes, bytes], effort: int, based: bool
) -> None:
    name, shape, before, after = case
    base, target = State(), State()
    base.add("w", name, shape, before)
    target.add("w", name, shape, after)
    packed = reparsed(pack(target, base if based else None, effort=effort, digests=True))
    assert packed.unpack(base.fill if based else None) == target.data


SPECIAL: dict[str, Any] = {
    "float32": np.array(
        [0x80000000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0x7F800000, 0xFF800000, 1, 0x807FFFFF],
        np.uint32,
    ),
    "bfloat16": np.array([0x8000, 0x7FC1, 0xFFFF, 0x7F81, 0x7F80, 0xFF80, 1], np.uint16),
    "float64": np.array([1 << 63, 0x7FF8000000000001, 0xFFF0000000000000, 1], np.uint64),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_bits_that_are_no_ordinary_numbers(name: str) -> None:
    values = np.tile(SPECIAL[name], 700)
    base, target = State(), State()
    base.add("w", name, values.shape, values)
    target.add("w", name, values.shape, np.roll(values, 1))
    assert reparsed(pack(target, base)).unpack(base.fill) == target.data
    assert reparsed(pack(target)).unpack() == target.data


@pytest.mark.parametrize("poison", [0x7FC00001, 0xFF800000, 0x80000000])
def test_a_poisoned_state_is_exact_although_its_rule_is_not(poison: int) -> None:
    base, target = trained()
    for state in (base, target):
        for key in state.data:
            bits = np.frombuffer(state.data[key], np.uint32).copy()
            bits[:40] = poison
            state.data[key] = bits.tobytes()
    packed = reparsed(pack(target, base, settings=SETTINGS))
    assert packed.unpack(base.fill) == target.data


def test_one_step_of_adamw_is_mostly_predicted() -> None:
    base, target = trained()
    packed = reparsed(pack(target, base, settings=SETTINGS))
    assert packed.unpack(base.fill) == target.data
    rules = {t.kind: t.fit.rule.name if t.fit else "" for t in packed.index.tensors}
    assert rules[Kind.PARAM] == "cast-bfloat16"
    assert rules[Kind.MASTER] == "adamw"
    assert rules[Kind.EXP_AVG_SQ] == "second-moment"
    (weights,) = packed.index.blocks_of(packed.index.tensors[0])
    assert (weights.form, weights.reference, weights.length) == (
        Form.EXACT,
        Reference.PREDICTION,
        0,
    )
    assert sum(map(len, target.data.values())) / packed.nbytes > 3


def test_settings_that_are_not_known_cost_room_and_no_bit() -> None:
    base, target = trained()
    known = pack(target, base, settings=SETTINGS)
    guessed = pack(target, base)
    wrong = pack(target, base, settings=FitSettings(0.5, 0.5, 1.0, 1.0, 1.0, 9, 3))
    for packed in (guessed, wrong):
        assert reparsed(packed).unpack(base.fill) == target.data
    assert known.nbytes < guessed.nbytes * 1.001
    assert wrong.nbytes < sum(map(len, target.data.values()))


def test_without_a_base_weights_still_follow_their_masters() -> None:
    _, target = trained()
    packed = reparsed(pack(target))
    assert packed.unpack() == target.data
    kinds = {t.kind: [b.form for b in packed.index.blocks_of(t)] for t in packed.index.tensors}
    assert kinds[Kind.PARAM] == [Form.EXACT]
    assert kinds[Kind.MASTER] == [Form.ROTATED]


def many_blocks() -> tuple[State, State]:
    """Three blocks of weights of which few change, with float32 masters."""
    rng = np.random.default_rng(1)
    count = 2 * BLOCK + 12345
    masters = rng.standard_normal(count).astype(np.float32)
    base, target = State(), State()
    for state in (base, target):
        weights = bf16(masters)
        weights[5::1000] += 1  # not quite the cast of the masters
        state.add("w", "bfloat16", (count,), weights)
        state.add("w", "float32", (count,), masters, Kind.MASTER)
        masters = masters.copy()
        masters[::50] *= np.float32(1.01)
    return base, target


def test_bytes_of_any_range() -> None:
    base, target = many_blocks()
    packed = reparsed(pack(target, base, digests=True))
    assert {b.form for b in packed.blocks} >= {Form.GAPS}
    asked: list[tuple[int, int]] = []

    stored = packed.read

    def read(name: str, offset: int, length: int) -> bytes:
        asked.append((offset, length))
        return stored(name, offset, length)

    rng = np.random.default_rng(2)
    for cache in (0, 64 << 20):
        decoder = DeltaDecoder(packed.index, read, base.fill, partial(int, cache))
        for key, data in target.data.items():
            for _ in range(6):
                start, stop = sorted(int(n) for n in rng.integers(0, len(data) + 1, 2))
                start = max(start, stop - 3000000)
                view = memoryview(bytearray(stop - start))
                decoder.fill(key, start, view)
                assert bytes(view) == data[start:stop]
    asked.clear()
    view = memoryview(bytearray(10))
    DeltaDecoder(packed.index, read, base.fill).fill(
        "w", 2 * BLOCK - 4, view
    )  # the end of a block, the next's begin
    # Two blocks of the weights and two of the masters that they follow, and nothing else.
    wanted = [packed.index.block(t, n) for t in packed.index.tensors for n in (0, 1)]
    assert sorted(asked) == sorted((b.offset, b.length) for b in wanted if b.length)


def test_what_predicts_others_is_decoded_once() -> None:
    base, target = trained()
    packed = reparsed(pack(target, base, settings=SETTINGS))
    asked: list[int] = []

    def read(name: str, offset: int, length: int) -> bytes:
        asked.append(offset)
        return packed.read(name, offset, length)

    decoder = DeltaDecoder(packed.index, read, base.fill)
    for key in ("exp_avg:w", "exp_avg_sq:w", "master:w", "w"):
        decoder.fill(key, 0, memoryview(bytearray(len(target.data[key]))))
    assert sorted(asked) == sorted(set(asked))


def test_what_lies_elsewhere_is_believed_if_it_is_right() -> None:
    base, target = trained()
    packed = reparsed(pack(target, base, settings=SETTINGS))
    index = packed.index
    stored = {tensor.key: index.block(tensor, 0).length for tensor in index.tensors}
    assert not stored["w"]  # it is as it is predicted
    helpers = sum(map(bool, stored.values()))
    assert helpers > 1
    asked: list[str] = []

    def read(name: str, offset: int, length: int) -> bytes:
        asked.append(name)
        return packed.read(name, offset, length)

    def right(key: str, offset: int, view: memoryview) -> bool:
        target.fill(key, offset, view)
        return True

    def wrong(key: str, offset: int, view: memoryview) -> bool:
        view[:] = bytes(len(view))
        return True

    def unpack(decoder: DeltaDecoder) -> int:
        asked.clear()
        view = memoryview(bytearray(len(target.data["w"])))
        decoder.fill("w", 0, view)
        assert view == target.data["w"]
        return len(asked)

    for look, reads in ((right, 0), (wrong, helpers), (lambda *_: False, helpers)):
        decoder = DeltaDecoder(index, read, base.fill)
        decoder.look = look
        assert unpack(decoder) == reads
    # Another thread says at any time that there is nothing to look into.
    forgetting = type("Forgetting", (DeltaDecoder,), {"look": property(lambda _: next(looks))})
    looks = cycle([wrong, None])
    assert unpack(forgetting(index, read, base.fill)) == helpers


def test_no_bytes_behind_the_end() -> None:
    _, target = trained()
    decoder = pack(target).decoder()
    for offset in (-1, len(target.data["w"]) - 9):
        with pytest.raises(ValueError, match="bytes"):
            decoder.fill("w", offset, memoryview(bytearray(10)))


def test_a_chain_of_ten() -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal(5000).astype(np.float32)
    base = State()
    base.add("w", "float32", values.shape, values)
    fill: Any = None
    below = None
    for _ in range(10):
        state = State()
        values = values + (rng.random(5000) < 0.1).astype(np.float32)
        state.add("w", "float32", values.shape, values)
        packed = reparsed(pack(state, below, base_fill=fill))
        fill = packed.decoder(fill).fill
        below = state
        view = memoryview(bytearray(values.nbytes))
        fill("w", 0, view)
        assert bytes(view) == values.tobytes()


def test_threads_share_a_decoder() -> None:
    from concurrent.futures import ThreadPoolExecutor

    base, target = many_blocks()
    packed = pack(target, base)
    decoder = packed.decoder(base.fill, cache=lambda: 1)

    def take(start: int) -> bool:
        view = memoryview(bytearray(400000))
        decoder.fill("w", start, view)
        return bytes(view) == target.data["w"][start : start + 400000]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(take, range(0, 3800000, 123456)))


def test_another_base_is_found() -> None:
    base, target = trained()
    packed = reparsed(pack(target, base, settings=SETTINGS))
    other = trained(seed=5)[0]
    with pytest.raises(CorruptError) as caught:
        packed.unpack(other.fill)
    assert caught.value.kind == "wrong-base"
    with pytest.raises(UsageError, match="step-6"):
        packed.decoder()


def test_bytes_of_objects() -> None:
    _, target = trained()
    packed = reparsed(pack(target, objects={"lr": b"\0\1", "empty": b""}))
    held = {o.name: packed.read("00000.blocks", o.offset, o.length) for o in packed.index.objects}
    assert held == {"lr": b"\0\1", "empty": b""}
