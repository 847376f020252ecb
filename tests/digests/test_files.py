"""Blocks are hashed in parallel, and one that cannot be read does not end the check of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from ftckpt.digests.blocks import Block, BlockDigest, BlockFailure, hash_or_fail
from ftckpt.errors import NotFoundError
from ftckpt.storage import open_store
from ftckpt.workers import Work


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_block_that_cannot_be_read_is_an_answer(tmp_path: Path, jobs: int) -> None:
    (tmp_path / "a").write_bytes(b"a" * 10)
    (tmp_path / "b").write_bytes(b"b" * 20)
    store = open_store(str(tmp_path))
    tasks = [Block(store, name, name, 0, 10) for name in ("a", "b", "gone", "b", "a")]
    done = sorted(Work(threads=jobs).run(tasks, hash_or_fail), key=lambda block: block.file)
    *hashed, failed = done
    assert isinstance(failed, BlockFailure)
    assert isinstance(failed.error, NotFoundError)
    assert failed[:3] == ("gone", 0, 10)
    assert hashed == [
        BlockDigest(name, 0, 10, xxhash.xxh3_128_digest(name.encode() * 10)) for name in "aabb"
    ]
