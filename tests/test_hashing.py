"""Blocks taken together by one thread: every block once, in order, and as many as are best then."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ftckpt import hashing
from ftckpt.digest import BLOCK, Block, BlockDigest
from ftckpt.errors import NotFoundError
from ftckpt.hashing import BlockFailure, hash_run
from ftckpt.store import Store
from ftckpt.stores import open_store
from ftckpt.stores.mapped import MappedHashing, Range

NOWHERE = open_store("memory://hashing")


class Half(MappedHashing):
    """Has every second range hashed, and by no process."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, 2)
        self.asked: list[Sequence[Range]] = []

    def digests(self, ranges: Sequence[Range]) -> list[bytes | None]:
        self.asked.append(ranges)
        return [bytes(16) if number % 2 else None for number in range(len(ranges))]


def tasks_of(lengths: Sequence[int]) -> list[Block]:
    return [Block(NOWHERE, "f", "f", number, length) for number, length in enumerate(lengths)]


@given(
    st.lists(st.integers(1, BLOCK) | st.just(BLOCK), max_size=200),
    st.integers(1, 16),
    st.lists(st.booleans(), max_size=20),
)
def test_each_block_is_in_one_run_and_in_order(
    lengths: list[int], jobs: int, useful: list[bool]
) -> None:
    mapped = MappedHashing(NOWHERE, jobs)
    tasks = tasks_of(lengths)
    runs = hashing._runs(iter(tasks), sum(lengths), jobs, mapped)
    taken = []
    for told in chain(useful, iter(lambda: True, None)):
        mapped.useful = told
        try:
            taken.append(next(runs))
        except StopIteration:
            break
    assert list(chain(*taken)) == tasks
    for number, run in enumerate(taken):
        left = sum(block.length for block in chain(*taken[number:]))
        size = sum(block.length for block in run)
        assert 1 <= len(run) <= mapped.most
        if len(run) > 1:
            assert size <= hashing._SPAN
            assert size * jobs <= left


def test_a_run_is_long_at_first_and_a_block_at_the_end() -> None:
    tasks = tasks_of([BLOCK // 2] * 120)
    mapped = MappedHashing(NOWHERE, 2)
    mapped.useful = True
    runs = hashing._runs(tasks, 60 * BLOCK, 2, mapped)
    counts = [len(run) for run in runs]
    assert counts[:4] == [8] * 4
    assert counts[-4:] == [1] * 4
    assert len(counts) < 40


@pytest.mark.parametrize("useful", [None, False])
def test_what_is_read_is_read_block_by_block(useful: bool | None) -> None:
    mapped = None if useful is None else MappedHashing(NOWHERE, 2)
    if mapped:
        mapped.useful = False
    tasks = tasks_of([BLOCK] * 9)
    assert list(chain(*hashing._runs(tasks, 9 * BLOCK, 2, mapped))) == tasks
    assert {len(run) for run in hashing._runs(tasks, 9 * BLOCK, 2, mapped)} == {1}


def test_what_one_block_lacks_is_no_matter_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 10)
    (tmp_path / "b").write_bytes(b"b" * 20)
    store = open_store(str(tmp_path))
    tasks = [Block(store, name, name, 0, 10) for name in ("a", "b", "gone", "b", "a")]
    mapped = Half(store)
    first, second, third, fourth, fifth = hash_run(tasks, mapped)
    assert isinstance(third, BlockFailure)
    assert isinstance(third.error, NotFoundError)
    assert third[:3] == ("gone", 0, 10)
    assert first == fifth == BlockDigest("a", 0, 10, xxhash.xxh3_128_digest(b"a" * 10))
    assert second == fourth == BlockDigest("b", 0, 10, bytes(16))
    assert mapped.asked == [[(name, 0, 10) for name in ("a", "b", "gone", "b", "a")]]
