"""Random streams: their states as words, and the draws between two states."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import CorruptError
from ftckpt.replay.record.streams import (
    RngStream,
    device_stream,
    difference_in_words,
    distance,
    numpy_stream,
    python_stream,
    read_stream,
    torch_stream,
)
from tests.campaign import examples


def python(draws: int, seed: int = 3) -> RngStream:
    generator = random.Random(seed)
    if draws:
        generator.getrandbits(32 * draws)
    return python_stream(generator.getstate())


@settings(max_examples=examples(20, 120), deadline=None)
@given(st.integers(0, 5000), st.integers(0, 5000))
def test_draws_are_counted_in_both_directions(a: int, b: int) -> None:
    assert distance(python(a), python(b)) == b - a


def test_all_three_generators_are_counted() -> None:
    legacy = np.random.RandomState(3)
    before = numpy_stream(tuple(legacy.get_state()))
    legacy.bytes(4 * 1001)
    assert distance(before, numpy_stream(tuple(legacy.get_state()))) == 1001
    generator = torch.Generator().manual_seed(3)
    first = torch_stream(bytes(generator.get_state().numpy()))
    for number in range(1, 1300):  # across two renewals of the block
        torch.empty((), dtype=torch.int64).random_(0, 2, generator=generator)
        now = torch_stream(bytes(generator.get_state().numpy()))
        assert distance(first, now) == number
    assert first.seed == 3


def test_making_an_iterator_of_a_loader_is_one_draw_of_64_bits() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        before = torch_stream(bytes(torch.get_rng_state().numpy()))
        iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(2))))
        after = torch_stream(bytes(torch.get_rng_state().numpy()))
    assert difference_in_words(before, after) == "one extra 64-bit draw"
    assert difference_in_words(after, before) == "one missing 64-bit draw"


def test_words_of_what_differs() -> None:
    assert difference_in_words(python(0), python(3)) == "3 extra 32-bit draws"
    assert difference_in_words(python(6000), python(0)) == "3,000 missing 64-bit draws"
    assert "not of the same sequence" in difference_in_words(python(0), python(0, seed=4))
    cached = random.Random(3)
    cached.gauss(0, 1)
    again = random.Random(3)
    again.random()
    again.random()
    a, b = python_stream(again.getstate()), python_stream(cached.getstate())
    assert a.digest != b.digest
    assert difference_in_words(a, b) == "same position, another cached normal deviate"
    seeds = [torch_stream(bytes(torch.Generator().manual_seed(n).get_state())) for n in (1, 2)]
    assert difference_in_words(*seeds) == "seeded with 2 instead of 1"


def test_a_device_has_a_seed_and_an_offset() -> None:
    def device(seed: int, offset: int) -> RngStream:
        return device_stream(seed.to_bytes(8, "little") + offset.to_bytes(8, "little"))

    assert distance(device(7, 4), device(7, 12)) == 8
    assert distance(device(7, 4), device(8, 4)) is None


def test_a_record_is_read_back() -> None:
    stream = python(5)
    assert read_stream(stream.record()) == stream
    short = read_stream(stream.record(whole=False))
    assert (short.digest, short.words) == (stream.digest, b"")
    assert difference_in_words(short, short._replace(digest="")) == "another state"


@pytest.mark.parametrize(
    "damaged",
    [{}, {"digest": 3}, {"digest": "", "words": "!"}, {"digest": "", "words": "QQ=="},
     {"digest": "", "position": "1"}],
)  # fmt: skip
def test_a_damaged_record_is_refused(damaged: dict[str, object]) -> None:
    with pytest.raises(CorruptError):
        read_stream(damaged)
