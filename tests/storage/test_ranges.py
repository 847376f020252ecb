"""Plans of ranged reads: every byte that was asked for, in few requests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint import Extent
from ftckpt.storage import StoreOptions, ranges
from ftckpt.storage.fsspec.store import FsspecStore
from ftckpt.storage.ranges import plan_runs, split_parts, waves
from ftckpt.storage.s3 import store as s3
from ftckpt.storage.s3.client import S3Object
from ftckpt.storage.s3.copy import Version

extents = st.lists(
    st.builds(Extent, st.sampled_from("ab"), st.integers(0, 300), st.integers(0, 60)), max_size=30
)


@given(extents, st.integers(0, 50), st.integers(1, 200))
def test_runs_answer_every_extent_once(asked: list[Extent], gap: int, limit: int) -> None:
    runs = plan_runs(asked, gap, limit)
    answers = sorted(want.asked for run in runs for want in run.wants)
    assert answers == [i for i, e in enumerate(asked) if e.length]
    for run in runs:
        for want in run.wants:
            extent = asked[want.asked]
            assert run.file == extent.file
            assert run.offset + want.start == extent.offset
            assert want.length == extent.length
            assert want.start + want.length <= run.length


@given(extents, st.integers(0, 50), st.integers(1, 200))
def test_runs_waste_no_more_than_gaps_and_keep_the_limit(
    asked: list[Extent], gap: int, limit: int
) -> None:
    for run in plan_runs(asked, gap, limit):
        spans = sorted((w.start, w.start + w.length) for w in run.wants)
        reach = 0
        for start, end in spans:
            assert start <= reach + gap
            reach = max(reach, end)
        assert reach == run.length
        assert run.length <= limit or any(w == (0, run.length) for w in ((0, e) for _, e in spans))


def test_near_extents_are_one_request_and_far_ones_are_not() -> None:
    near = [Extent("f", 0, 10), Extent("f", 100, 10)]
    assert [(r.offset, r.length) for r in plan_runs(near, gap=90)] == [(0, 110)]
    assert [(r.offset, r.length) for r in plan_runs(near, gap=89)] == [(0, 10), (100, 10)]


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 300))
def test_parts_tile_the_range(offset: int, length: int, part: int) -> None:
    parts = split_parts(offset, length, part)
    assert sum(n for _, n in parts) == length
    assert all(0 < n <= part for _, n in parts)
    assert [o for o, _ in parts] == list(range(offset, offset + length, part))


def test_what_is_read_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "budget", lambda: 16 * 100)
    asked = [Extent("a", at, length) for at, length in ((0, 60), (100, 40), (200, 1), (300, 500))]
    found = [[run.length for run in wave] for wave in waves(plan_runs(asked, 10))]
    assert found == [[60, 40], [1], [500]]
    assert list(waves([])) == []


FAR = 4 << 20
CONTENT = bytes(range(256)) * (8 * FAR // 256)
# Of runs of a mebibyte, a few bytes each.
SPREAD = [
    Extent("a", at + more, 16) for at in range(0, 8 * FAR, FAR) for more in (0, 1 << 19, 1 << 20)
]


def test_s3_holds_few_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = [0]
    most: list[int] = []

    class Client:
        def __init__(self, options: StoreOptions) -> None:
            self.options = options

        def run(self, coroutine: Coroutine[Any, Any, object]) -> object:
            return asyncio.run(coroutine)

    async def read_bytes(
        client: Client, at: S3Object, offset: int, length: int, version: Version
    ) -> memoryview:
        held[0] += length
        most.append(held[0])
        await asyncio.sleep(0)
        held[0] -= length
        return memoryview(CONTENT)[offset : offset + length]

    monkeypatch.setattr(s3, "S3Client", Client)
    monkeypatch.setattr(s3, "read_bytes", read_bytes)
    monkeypatch.setattr(ranges, "budget", lambda: 16 * (3 << 20))
    found = s3.S3Store("s3://bucket/run", StoreOptions()).read_many(SPREAD)
    assert found == [CONTENT[e.offset : e.end] for e in SPREAD]
    assert 1 << 20 < max(most) <= 3 << 20


def test_other_stores_hold_few_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    files = MemoryFileSystem()
    files.pipe_file("/spread/a", CONTENT)
    store = FsspecStore("memory://spread", files, StoreOptions())
    most: list[int] = []
    read = store.ranges

    def counting(asked: list[tuple[str, int, int]]) -> list[bytes]:
        most.append(sum(length for _, _, length in asked))
        return read(asked)

    monkeypatch.setattr(store, "ranges", counting)
    monkeypatch.setattr(ranges, "budget", lambda: 16 * (3 << 20))
    assert store.read_many(SPREAD) == [CONTENT[e.offset : e.end] for e in SPREAD]
    assert 1 << 20 < max(most) <= 3 << 20
