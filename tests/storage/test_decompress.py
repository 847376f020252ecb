"""Stream transforms: undone exactly, bounded, and damage is told."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint import Extent
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.storage import open_store
from ftckpt.storage.decompress import MAX_WINDOW, base_name, read_undone, supported, undo
from ftckpt.storage.source import Source


def packed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


@given(
    frames=st.lists(st.binary(max_size=2000), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 3000), max_size=4),
    limit=st.integers(0, 9000),
)
def test_frames_in_any_cut_are_undone(frames: list[bytes], cuts: list[int], limit: int) -> None:
    stored = b"".join(map(packed, frames))
    edges = [0, *sorted(min(c, len(stored)) for c in cuts), len(stored)]
    parts = [stored[a:b] for a, b in pairwise(edges)]
    assert b"".join(undo(["stream.zstd"], parts, limit=limit)) == b"".join(frames)[:limit]


def test_transforms_are_undone_one_after_the_other() -> None:
    stored = packed(packed(b"hello" * 100))
    got = b"".join(undo(["stream.zstd", "stream.zstd/1"], [stored], limit=10**6))
    assert got == b"hello" * 100


def test_no_transform_is_no_change() -> None:
    assert list(undo([], [b"abc", memoryview(b"def")], limit=5)) == [b"abc", b"de"]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("stream.zstd", True),
        ("stream.zstd/1", True),
        ("stream.zstd@local/1.2", True),
        ("stream.zstd/2", False),
        ("stream.lz4", False),
        ("", False),
    ],
)
def test_which_are_known(name: str, known: bool) -> None:
    assert supported([name]) is known


def test_a_descriptor_has_a_domain_and_a_version() -> None:
    assert base_name("stream.zstd@place/1.0") == "stream.zstd"


def test_unknown_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="secret"):
        list(undo(["secret"], [b""], limit=1))


def test_noise_is_damage() -> None:
    with pytest.raises(CorruptError) as caught:
        list(undo(["stream.zstd"], [bytes(100)], limit=1, file="f"))
    assert (caught.value.kind, caught.value.file) == ("bad-transform", "f")


def test_a_window_that_needs_too_much_memory_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    stored = compressor.compress(bytes(1000)) + compressor.flush()
    assert MAX_WINDOW < 1 << 30
    with pytest.raises(CorruptError, match="memory"):
        list(undo(["stream.zstd"], [stored], limit=1))


def test_a_range_of_a_stored_record(tmp_path: Path) -> None:
    data = bytes(range(256)) * 20_000
    stored = packed(data)
    (tmp_path / "f").write_bytes(b"head" + stored + b"tail")
    source = Source.directory(open_store(str(tmp_path)))
    extent = Extent("f", 4, len(stored))
    for place in ((0, 10), (2_000_003, 1_500_000), (len(data), 0), (len(data) - 1, 1)):
        expected = data[place[0] : sum(place)]
        assert read_undone(source, extent, ["stream.zstd"], place) == expected
    with pytest.raises(CorruptError, match="are needed"):
        read_undone(source, extent, ["stream.zstd"], (len(data), 1))
    with pytest.raises(CorruptError) as caught:
        read_undone(source, Extent("f", 1, len(stored)), ["stream.zstd"], (0, 1))
    assert (caught.value.offset, caught.value.length) == (1, len(stored))
