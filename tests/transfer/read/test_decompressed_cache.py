"""Compressed records are undone once each, and what is held at a time has one bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zstandard

from ftckpt.checkpoint import Payload
from ftckpt.errors import CorruptError, NoResourceError
from ftckpt.extents import Extent
from ftckpt.storage import open_store
from ftckpt.storage.decompress import undo_into
from ftckpt.storage.source import Source
from ftckpt.transfer.read.decompressed_cache import UndoneStreams
from ftckpt.workers.budget import budget, set_budget

LENGTH = 1 << 20
RECORDS = 6


@pytest.fixture
def source() -> Source:
    store = open_store("memory://compressed")
    for number in range(RECORDS):
        store.put(f"record{number}", zstandard.compress(bytes([number]) * LENGTH))
    return Source.directory(store)


@pytest.fixture
def bounded() -> Iterator[None]:
    before = budget()
    set_budget(4 * LENGTH)  # two records at a time
    yield
    set_budget(before)


def _payload(source: Source, number: int, length: int = LENGTH) -> Payload:
    extent = Extent(f"record{number}", 0, source.size(f"record{number}"))
    return Payload(extent, transforms=("stream.zstd",), inner=(0, length))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each record as it is undone, and how many are being undone then."""
    seen: list[tuple[str, int]] = []
    real, lock, busy = undo_into, threading.Lock(), 0

    def counted(reader: Any, extent: Extent, *more: Any, **named: Any) -> int:
        nonlocal busy
        with lock:
            busy += 1
            seen.append((extent.file, busy))
        time.sleep(0.01)  # others come meanwhile
        found = real(reader, extent, *more, **named)
        with lock:
            busy -= 1
        return found

    monkeypatch.setattr("ftckpt.transfer.read.decompressed_cache.undo_into", counted)
    return seen


def test_many_that_ask_for_one_record_undo_it_once(
    source: Source, held: list[tuple[str, int]]
) -> None:
    streams = UndoneStreams(source)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(streams.get, [_payload(source, n % 2) for n in range(40)]))
    assert [bytes(f[:3]) for f in found[:2]] == [bytes(3), b"\1\1\1"]
    assert sorted(name for name, _ in held) == ["record0", "record1"]


@pytest.mark.usefixtures("bounded")
def test_no_more_are_held_than_the_budget_says(source: Source, held: list[tuple[str, int]]) -> None:
    streams = UndoneStreams(source)
    with ThreadPoolExecutor(8) as pool:
        asked = [n for n in range(RECORDS) for _ in range(4)]
        for number, data in zip(
            asked, pool.map(lambda n: streams.get(_payload(source, n)), asked), strict=True
        ):
            assert data[0] == number
            assert len(data) == LENGTH
            assert sum(map(len, streams._kept.values())) <= 2 * LENGTH
    assert max(count for _, count in held) <= 2


@pytest.mark.usefixtures("bounded")
def test_one_that_is_too_large_is_refused(source: Source) -> None:
    with pytest.raises(NoResourceError, match="a compressed record of record0"):
        UndoneStreams(source).get(_payload(source, 0, 3 * LENGTH))


def test_who_waits_for_a_damaged_record_is_told(
    source: Source, held: list[tuple[str, int]]
) -> None:
    streams = UndoneStreams(source)
    payload = _payload(source, 0, LENGTH + 1)
    with ThreadPoolExecutor(4) as pool:
        for waiting in [pool.submit(streams.get, payload) for _ in range(4)]:
            assert isinstance(waiting.exception(timeout=60), CorruptError)
    assert len(held) == 4
    assert len(streams.get(_payload(source, 0))) == LENGTH  # another length is another answer


def test_what_is_let_go_is_undone_again(source: Source, held: list[tuple[str, int]]) -> None:
    streams = UndoneStreams(source)
    for _ in range(2):
        streams.get(_payload(source, 0))
        streams.clear()
    assert len(held) == 2
