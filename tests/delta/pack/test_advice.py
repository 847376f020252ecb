"""Advice follows from its numbers: against plain sums, and at its edges."""

from __future__ import annotations

from math import isclose
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.delta.pack.report import Advice, advise
from ftckpt.errors import UsageError
from ftckpt.planning.models.storage import compare

GB = 1e9
GIVEN: dict[str, float] = {
    "ratio": 5.0,
    "encode_rate": 1.0 * GB,
    "decode_rate": 1.2 * GB,
    "storage_write": 0.25 * GB,
}


def advised(**given: Any) -> Advice:
    return advise(**{**GIVEN, **given})


def test_by_hand() -> None:
    advice = advised(saves_per_restore=10)
    # The encoder takes a quarter of what the storage takes for plain bytes; a fifth is written.
    assert advice.delta_save == pytest.approx(0.25)
    assert advice.link_restore == pytest.approx(0.25 / 1.2)
    assert (advice.full_save, advice.full_restore, advice.break_even) == (1.0, 1.0, 1.0 * GB)
    # sqrt(2 * 10 * 0.75 / 0.2083) = 8.49
    assert advice.chain == 7
    assert advice.stored == pytest.approx((1 + 7 / 5) / 8)
    assert advice.save == pytest.approx((1 + 7 * 0.25) / 8)
    assert advice.often == pytest.approx(advice.save**-0.5)
    assert advice.restore(7) == pytest.approx(1 + 7 * 0.25 / 1.2)
    assert advice.sentence == (
        "a delta is saved in 25% of the time of the plain checkpoint; that pays on storage slower"
        " than 1 GB/s; with a restart for every 10 saves put 7 deltas on each full checkpoint:"
        " the last takes 2.5 times as long to restore, 30% of the room is needed, and saving 1.7"
        " times as often costs no more"
    )


rates = st.floats(1e6, 1e12)
ratios = st.floats(0.5, 200)


@given(ratios, rates, rates, rates, rates)
def test_the_times_are_those_of_the_planner(
    ratio: float, encode: float, decode: float, write: float, read: float
) -> None:
    advice = advise(
        ratio=ratio,
        encode_rate=encode,
        decode_rate=decode,
        storage_write=write,
        storage_read=read,
        full_ratio=ratio,
    )
    saving, reading = compare(1.0, ratio, encode, write), compare(1.0, ratio, decode, read)
    assert isclose(advice.delta_save, saving.pipelined / saving.plain, rel_tol=1e-12)
    assert isclose(advice.link_restore, reading.pipelined / reading.plain, rel_tol=1e-12)
    assert advice.break_even == saving.pipelined_below
    if ratio != 1:
        assert (advice.full_save, advice.full_restore) == (advice.delta_save, advice.link_restore)


@given(ratios, rates, rates, rates, rates, st.just(1.0) | st.floats(1, 3), st.floats(0.5, 1000))
def test_no_other_chain_takes_less(
    ratio: float,
    encode: float,
    decode: float,
    write: float,
    read: float,
    full: float,
    saves: float,
) -> None:
    advice = advise(
        ratio=ratio,
        encode_rate=encode,
        decode_rate=decode,
        storage_write=write,
        storage_read=read,
        full_ratio=full,
        saves_per_restore=saves,
    )

    def seconds(rate: float, bandwidth: float, shrunk: float) -> float:
        """Of moving a byte; what is stored plain passes no codec."""
        return 1 / bandwidth if shrunk == 1.0 else max(1 / rate, 1 / (shrunk * bandwidth))

    first, later = seconds(encode, write, full), max(1 / encode, 1 / (ratio * write))
    start, link = seconds(decode, read, full), max(1 / decode, 1 / (ratio * read))
    assert advice.full_save / write == pytest.approx(first)
    assert advice.delta_save / write == pytest.approx(later)
    assert advice.restore(3) / read == pytest.approx(start + 3 * link)

    def spent(deltas: int) -> float:
        """Time between restarts: all saves, and a restart that finds any link of the chain."""
        restores = [start + number * link for number in range(deltas + 1)]
        return (saves * (first + deltas * later) + sum(restores)) / (deltas + 1)

    others = {max(0, advice.chain + step) for step in (-3, -1, 1, 3)} | {0}
    least = min(map(spent, others))
    if advice.chain < 2000:
        assert spent(advice.chain) <= least * (1 + 1e-9)


@given(ratios, rates, rates)
def test_it_pays_exactly_below_the_break_even(ratio: float, encode: float, write: float) -> None:
    advice = advised(ratio=ratio, encode_rate=encode, storage_write=write)
    if not isclose(write, encode, rel_tol=1e-9):
        assert advice.pays == (ratio > 1 and write < encode)
    assert advice.break_even == (encode if ratio > 1 else 0)
    assert advice.pays or advice.chain == 0
    assert ("keep every checkpoint full" in advice.sentence) <= (advice.chain == 0)


def test_fast_storage_and_what_does_not_shrink() -> None:
    fast = advised(storage_write=4 * GB)
    assert (fast.pays, fast.chain, fast.stored, fast.often) == (False, 0, 1.0, 1.0)
    assert fast.sentence == (
        "a delta takes 4 times as long to save as the plain checkpoint: storage of 4 GB/s is not"
        " slower than encoding, 1 GB/s; it saves room alone, 80%"
    )
    useless = advised(ratio=0.99)
    assert not useless.pays
    assert useless.sentence.startswith("a delta is not smaller")


def test_one_who_restarts_all_the_time_keeps_full_checkpoints() -> None:
    often = advised(saves_per_restore=0.1)
    assert (often.pays, often.chain) == (True, 0)
    assert often.sentence.endswith("for every 0.1 saves keep every checkpoint full")
    assert "1 delta on" in advised(saves_per_restore=0.5).sentence


def test_a_full_checkpoint_that_is_compressed_too() -> None:
    plain, packed = advised(), advised(full_ratio=1.45)
    assert packed.full_save == pytest.approx(1 / 1.45)
    assert packed.full_restore == pytest.approx(1 / 1.45)
    assert packed.chain < plain.chain


def test_storage_that_reads_faster_than_it_writes() -> None:
    quick = {"decode_rate": 50 * GB}
    assert advised(storage_read=1 * GB, **quick).chain > advised(**quick).chain


@pytest.mark.parametrize("name", [*GIVEN, "storage_read", "full_ratio", "saves_per_restore"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_what_cannot_be(name: str, value: float) -> None:
    with pytest.raises(UsageError, match="must be"):
        advised(**{name: value})
