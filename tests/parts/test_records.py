"""Shares and records: every task is in one part, and a record that was touched is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import CorruptError, IncompleteError, RefusedError, TruncatedError
from ftckpt.findings import finding
from ftckpt.operations.many.building import AllWritten
from ftckpt.parts import WorkPart
from ftckpt.parts.check_tasks import dump_finding, load_finding
from ftckpt.parts.finish import Gathered, dump_error, gather, load_error
from ftckpt.parts.plan import ShareRecord, WorkPlan, parse_record
from ftckpt.parts.shared_folder import PartsPlace
from ftckpt.parts.shares import ByteRow
from ftckpt.storage import open_store
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.store import Entry

PLAN = WorkPlan("verify", "/ckpt/step-1", "a" * 32, "b" * 32)
RECORD = ShareRecord(
    PLAN, WorkPart(2, 3), {"hash 0 a.bin": "00" * 16, "crc 0 12 b\udc80.bin": [12, 7]}, host="n1",
    ended="2026-11-26T10:00:00Z", seconds=1.5, nbytes=12, errors=1,
)  # fmt: skip


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(1, 20), st.integers(1, 50)
)
def test_every_task_is_in_one_part_and_parts_are_equal(
    sizes: list[int], parts: int, block: int
) -> None:
    row = ByteRow.of((f"f{number}", size) for number, size in enumerate(sizes))
    loads = [0] * parts
    for number, size in enumerate(sizes):
        for offset in range(0, size, block):
            length = min(block, size - offset)
            loads[row.part(f"f{number}", offset, length, parts)] += length
    assert sum(loads) == sum(sizes)
    assert max(loads) <= sum(sizes) / parts + block


def test_neighbours_are_read_by_one_part() -> None:
    row = ByteRow.of([("a", 100), ("b", 100)])
    owners = [row.part(name, at, 10, 4) for name in "ab" for at in range(0, 100, 10)]
    assert owners == sorted(owners)
    assert set(owners) == {0, 1, 2, 3}


def test_a_record_is_read_as_it_was_written() -> None:
    assert parse_record(RECORD.dump(), "it") == RECORD


def test_a_cut_record_is_refused_wherever_it_is_cut() -> None:
    data = RECORD.dump()
    for end in range(len(data)):
        with pytest.raises(RefusedError):
            parse_record(data[:end], "it")


def test_a_changed_byte_is_refused_wherever_it_is() -> None:
    data = RECORD.dump()
    for at in range(len(data)):
        forged = bytearray(data)
        forged[at] ^= 1
        with pytest.raises(RefusedError):
            parse_record(bytes(forged), "it")


@pytest.mark.parametrize(
    "field",
    [{"part": WorkPart(1, 3)}, {"plan": PLAN._replace(listing="c" * 32)}, {"stage": "write"}],
    ids=str,
)
def test_a_whole_record_in_the_wrong_place_is_refused(
    tmp_path: Path, field: dict[str, object]
) -> None:
    place = PartsPlace(open_store(str(tmp_path)), "parts", PLAN)
    other = dataclasses.replace(RECORD, **field)  # type: ignore[arg-type]
    place.store.create(place.path(WorkPart(2, 3)), other.dump())
    with pytest.raises(RefusedError):
        place.find(WorkPart(2, 3))


def test_the_same_part_twice(tmp_path: Path) -> None:
    place = PartsPlace(open_store(str(tmp_path)), "parts", PLAN)
    assert place.create(RECORD) is RECORD
    again = dataclasses.replace(RECORD, host="n2", seconds=9.0)
    assert place.create(again) == RECORD
    other = dataclasses.replace(RECORD, units={**RECORD.units, "hash 0 a.bin": "11" * 16})
    with pytest.raises(RefusedError, match="done twice, by n1 and n1, with different results"):
        place.create(other)
    assert place.find(WorkPart(2, 3)) == RECORD


def test_errors_and_findings_come_back_as_they_were() -> None:
    error = TruncatedError("short", hint="h", file="f", tensor="t", offset=1, length=2)
    back = load_error(dump_error(error))
    assert type(back) is TruncatedError
    assert vars(back) == vars(error)
    assert isinstance(back, CorruptError)
    found = finding("bad-crc", "it differs", file="f", tensor="t", rank=1, offset=2, length=3)
    assert load_finding(dump_finding(found)) == found


@pytest.mark.parametrize("value", [{"error": "os"}, {"error": "ExitCode", "message": ""}, {}, 3])
def test_what_is_no_error_is_refused(value: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        load_error(value)


def test_seconds_are_those_of_all_parts() -> None:
    """Else a copy of terabytes takes as long as its end, and its speed is no machine's."""
    records = [ShareRecord(PLAN, WorkPart(n, 2), {}, seconds=2.0 + n) for n in range(2)]
    written = AllWritten(records[:1], "place", Gathered(records, []))
    assert written.taken({"copy": 1.0, "prove": 0.5}, "copy") == {"copy": 6.0, "prove": 2.5}
    assert written.taken({"check": 1.0, "write": 1.0}, "write") == {"check": 1.0, "write": 6.0}


@pytest.mark.parametrize("name", ["0-4000000000", "7-3", "1-" + "9" * 5000, "0-0"])
def test_a_name_of_more_parts_than_there_can_be_is_no_record(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks which parts are missing counts up to the number in the name."""
    store = MemoryStore("memory://planted-parts")
    place = PartsPlace(store, "parts", PLAN)
    if len(name) < 200:
        store.put(place.path(WorkPart(0, 1)).replace("0-1", name), RECORD.dump())
    else:
        monkeypatch.setattr(store, "children", lambda path: [Entry(f"{path}/{name}.json", 1)])
    assert place.listed() == []
    with pytest.raises(IncompleteError):
        gather(place, None)
