"""Blosc buffers of c-blosc (by numcodecs, in tests/data/orbax/blosc.json), and ones that lie."""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from pathlib import Path

import pytest

from ftckpt.errors import CorruptError, FtckptError, NoResourceError, UnsupportedError
from ftckpt.storage.blosc import decode_blosc
from ftckpt.storage.decompress import BLOSC, GZIP, ZLIB, undo

REAL = {
    name: base64.b64decode(text)
    for name, text in json.loads(
        (Path(__file__).parents[1] / "data" / "orbax" / "blosc.json").read_text()
    ).items()
}
READ = [name for name in REAL if not name.startswith("blosclz")]
SPLIT = REAL["lz4 1 float32 600 1024"]


def truth(name: str) -> bytes:
    import numpy as np

    _, _, dtype, count, _ = name.split()
    return (np.arange(int(count)) // 7).astype(dtype).tobytes()


@pytest.mark.parametrize("name", READ)
def test_what_c_blosc_has_packed(name: str) -> None:
    raw = REAL[name]
    assert b"".join(decode_blosc(raw)) == truth(name)
    for cut in (0, 1, 15, len(raw) // 2, len(raw) - 1):
        with pytest.raises(CorruptError):
            list(decode_blosc(raw[:cut]))


def test_its_own_compressor_is_refused_by_name() -> None:
    [name] = set(REAL) - set(READ)
    with pytest.raises(UnsupportedError, match="blosclz"):
        list(decode_blosc(REAL[name]))


def changed(at: int, value: int, length: int = 4) -> bytes:
    return SPLIT[:at] + value.to_bytes(length, "little") + SPLIT[at + length :]


@pytest.mark.parametrize(
    ("raw", "error"),
    {
        "a version of the future": (changed(0, 9, 1), UnsupportedError),
        "elements of nothing": (changed(3, 0, 1), CorruptError),
        "fewer bytes than it has": (changed(4, 1), CorruptError),
        "more bytes than it has": (changed(4, (1 << 32) - 1), CorruptError),
        "blocks of nothing": (changed(8, 0), CorruptError),
        "a block beyond all": (changed(8, (1 << 32) - 1), CorruptError),
        "a bomb of one block": (
            changed(4, (1 << 31) - 1)[:8] + ((1 << 31) - 1).to_bytes(4, "little") + SPLIT[12:],
            NoResourceError,
        ),
        "a length that lies": (changed(12, len(SPLIT) + 1), CorruptError),
        "a block before the first": (changed(16, 0), CorruptError),
        "a block beyond the end": (changed(16, (1 << 31) - 1), CorruptError),
        "copied bytes of another length": (changed(2, 2, 1), CorruptError),
    }.values(),
)  # fmt: skip
def test_a_buffer_that_lies(raw: bytes, error: type[FtckptError]) -> None:
    with pytest.raises(error):
        list(decode_blosc(raw, file="0.0"))


def test_every_byte_changed_has_a_verdict() -> None:
    for name in ("lz4 1 float32 600 1024", "zlib 2 float32 600 1024", "zstd 0 int16 77 0"):
        raw = REAL[name]
        for at in range(len(raw)):
            mutated = raw[:at] + bytes([raw[at] ^ 0x41]) + raw[at + 1 :]
            try:
                found = b"".join(decode_blosc(mutated))
            except FtckptError:
                continue
            assert len(found) < 1 << 20


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 3 << 20])
def test_gzip_and_zlib(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    for name, raw in ((GZIP, gzip.compress(data)), (ZLIB, zlib.compress(data))):
        assert b"".join(undo((name,), [raw[:7], raw[7:]], limit=1 << 40)) == data
        assert b"".join(undo((name,), [raw], limit=5)) == data[:5]
        for bad in (raw[:-1], raw[: len(raw) // 2], b""):
            with pytest.raises(CorruptError):
                list(undo((name,), [bad], limit=1 << 40))
    several = gzip.compress(data) + gzip.compress(b"more")
    assert b"".join(undo((GZIP,), [several], limit=1 << 40)) == data + b"more"
    with pytest.raises(CorruptError):
        list(undo((ZLIB,), [zlib.compress(data) + b"more"], limit=1 << 40))


def test_a_bomb_is_cut_at_what_is_wanted() -> None:
    raw = gzip.compress(bytes(64 << 20))
    assert sum(map(len, undo((GZIP,), [raw], limit=10))) == 10
    assert b"".join(undo((BLOSC,), [SPLIT], limit=10)) == truth("lz4 1 float32 600 1024")[:10]
