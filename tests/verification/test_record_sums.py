"""What is read is summed up record by record, in whatever pieces it is read."""

from __future__ import annotations

import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint import Box, Checkpoint, Extent, Kind, Piece, Record, TensorInfo
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.comparison import compare
from ftckpt.comparison.state import Vocabulary
from ftckpt.comparison.tensors import Reading
from ftckpt.errors import ExitCode
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.source import Source
from ftckpt.transfer.content import Content
from ftckpt.verification.record_sums import ReadSums, RecordIndex
from tests.builders.checkpoints import open_checkpoint, save_dcp
from tests.comparison.test_evidence import Recorded

DATA = bytes(range(200))


def recorded(*places: tuple[int, int], data: bytes = DATA, wrong: bool = False) -> Recorded:
    """Return a checkpoint of one file of bytes, in which some places have a sum."""
    store = MemoryStore("memory://sums")
    store.put("f", data)
    pieces = [Piece(Box((0,), (len(data),)), Extent("f", 0, len(data)))]
    info = TensorInfo("model", "w", Kind.PARAM, (len(data),), DTYPES["uint8"], pieces)
    records = [
        Record(Extent("f", start, stop - start), zlib.crc32(DATA[start:stop]) ^ wrong, "w")
        for start, stop in places
    ]
    return Recorded(
        source=Source.directory(store), tensors={"w": info}, objects={}, recorded=records
    )


def doubtful(checkpoint: Checkpoint, *reads: tuple[int, int]) -> list[tuple[int, bool]]:
    sums = ReadSums(RecordIndex(checkpoint))
    for start, stop in reads:
        sums.saw("f", start, memoryview(DATA)[start:stop])
        sums.take(sums.drain())
    return [(record.extent.offset, misread) for record, misread in sums.doubtful()]


@given(cuts=st.sets(st.integers(1, 199)), order=st.randoms())
def test_whatever_the_pieces_and_their_order(cuts: set[int], order: object) -> None:
    bounds = [0, *sorted(cuts), 200]
    reads = list(pairwise(bounds))
    order.shuffle(reads)  # type: ignore[attr-defined]
    places = (3, 50), (50, 51), (60, 200)
    assert doubtful(recorded(*places), *reads) == []
    assert doubtful(recorded(*places), *reads, *reads) == []  # what is read twice counts once
    assert doubtful(recorded(*places, wrong=True), *reads) == [(3, True), (50, True), (60, True)]


def test_what_was_read_in_part_is_in_doubt_and_what_was_not_read_is_not() -> None:
    places = (0, 50), (50, 100), (100, 150)
    assert doubtful(recorded(*places), (0, 50), (60, 100)) == [(50, False)]
    assert doubtful(recorded(*places), (0, 20), (30, 50)) == [(0, False)]


def test_bytes_that_were_read_wrongly_on_the_way_are_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = recorded((0, 200))
    saw = ReadSums.saw

    def flipped(self: ReadSums, file: str, offset: int, data: memoryview) -> None:
        data[0] ^= 1
        saw(self, file, offset, data)

    monkeypatch.setattr(ReadSums, "saw", flipped)
    report = compare(
        Content.of(one), Content.of(one), Reading(), fields=lambda _: (), vocabulary=Vocabulary()
    )
    assert report.code is ExitCode.UNAVAILABLE
    assert {found.kind for found in report.findings} == {"unavailable"}
    assert "compare again" in report.findings[0].message


def test_compressed_records_are_undone_and_checked(tmp_path: Path) -> None:
    one = save_dcp(tmp_path / "one", compressed=True)
    checkpoint = open_checkpoint(one)

    def compared(first: Checkpoint, second: Checkpoint) -> tuple[ExitCode, set[str]]:
        report = compare(
            Content.of(first), Content.of(second), Reading(), fields=lambda _: (),
            vocabulary=Vocabulary(),
        )  # fmt: skip
        return report.code, {found.kind for found in report.findings}

    assert compared(checkpoint, open_checkpoint(one)) == (ExitCode.OK, set())
    records = [replace_crc(record) for record in checkpoint.records()]
    other = open_checkpoint(one)
    other.records = lambda: iter(records)  # type: ignore[method-assign]
    assert compared(checkpoint, other) == (ExitCode.CORRUPT, {"bad-crc"})


def replace_crc(record: Record) -> Record:
    return record._replace(crc32=(record.crc32 or 0) ^ 1)


def test_a_checkpoint_whose_records_cannot_be_listed_is_damaged() -> None:
    whole = recorded((0, 200))
    report = compare(
        Content.of(whole), Content.of(replace(whole, damaged=True)), Reading(),
        fields=lambda _: (), vocabulary=Vocabulary(),
    )  # fmt: skip
    assert report.code is ExitCode.CORRUPT
    assert report.total.counts == {"equal": 1}
