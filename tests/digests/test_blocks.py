"""Block and file digests: the documented vectors, any number of threads, other tools agree."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import xxhash

from ftckpt.digests.blocks import (
    block_count,
    blocks,
    blocks_of_bytes,
    file_digest,
    hash_block,
    hash_files,
)
from ftckpt.errors import TruncatedError
from ftckpt.extents import BLOCK
from ftckpt.storage import open_store
from ftckpt.storage.ranges import chunks
from ftckpt.storage.source import Source
from ftckpt.workers import Work
from ftckpt.workers.limits import RateLimit

# The vectors of docs/manifest.md.
VECTORS = [
    (b"", [], "99aa06d3014798d86001c324468d497f"),
    (b"hello", ["b5e9c1ad071b3e7fc779cfaa5e523818"], "f91fa2c012147a5094b7d1a3eb7f796d"),
]


@pytest.mark.parametrize(("data", "digests", "whole"), VECTORS)
def test_vectors(data: bytes, digests: list[str], whole: str) -> None:
    found = blocks_of_bytes(data)
    assert found.hex() == "".join(digests)
    assert file_digest(found).hex() == whole


@pytest.mark.parametrize(
    ("size", "count"), [(0, 0), (1, 1), (BLOCK, 1), (BLOCK + 1, 2), (7 * BLOCK - 1, 7)]
)
def test_block_counts(size: int, count: int) -> None:
    assert block_count(size) == count


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of no block, one, and three; the long one is mostly a hole."""
    root = tmp_path_factory.mktemp("digest")
    (root / "sub").mkdir()
    (root / "empty").write_bytes(b"")
    (root / "short").write_bytes(os.urandom(3_000_001))
    with (root / "sub" / "long").open("wb") as file:
        file.write(os.urandom(1000))
        file.seek(2 * BLOCK - 10)
        file.write(os.urandom(500))
    return root


def expected(root: Path, name: str) -> bytes:
    data = (root / name).read_bytes()
    return b"".join(xxhash.xxh3_128_digest(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK))


@pytest.mark.parametrize("jobs", [1, 4])
def test_files_in_parallel(place: Path, jobs: int) -> None:
    source = Source.directory(open_store(str(place)))
    sizes = {name: entry.size for name, entry in source.entries.items()}
    found = hash_files(source, sizes, work=Work(threads=jobs))
    assert found == {name: expected(place, name) for name in ("empty", "short", "sub/long")}


def test_other_processes_can_do_the_work(place: Path) -> None:
    source = Source.directory(open_store(str(place)))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = hash_files(
            source,
            {"short": 3_000_001},
            work=Work(threads=1, executor=pool, limiter=RateLimit(1e12)),
        )
    assert found == {"short": expected(place, "short")}


def test_tasks_are_plain_data(place: Path) -> None:
    source = Source.directory(open_store(str(place)))
    for block in blocks(source, {"sub/long": source.size("sub/long")}):
        again = pickle.loads(pickle.dumps(block))
        assert hash_block(again) == hash_block(block)


def test_a_file_that_shrank_is_truncated(place: Path) -> None:
    source = Source.directory(open_store(str(place)))
    with pytest.raises(TruncatedError):
        hash_files(source, {"short": 3_000_002}, work=Work(threads=2))


@pytest.mark.skipif(shutil.which("xxhsum") is None, reason="xxhsum is not installed")
def test_xxhsum_agrees_on_a_block(place: Path) -> None:
    said = subprocess.run(
        ["xxhsum", "-H2", str(place / "short")], check=True, capture_output=True, text=True
    ).stdout.split()[0]
    assert said == expected(place, "short").hex()


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 0), (0, 10), (5, 2_999_000), (131_071, 262_146)]
)
@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_chunks_are_the_range(place: Path, offset: int, length: int, size: int) -> None:
    if length // size > 10_000:
        size = 700
    data = (place / "short").read_bytes()
    with open_store(str(place)).open("short") as reader:
        got = b"".join(bytes(view) for view in chunks(reader, offset, length, size=size))
    assert got == data[offset : offset + length]
