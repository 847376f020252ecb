"""Decode a buffer of Blosc 1, without its library: a header, and blocks of another compressor.

A header of 16 bytes has flags, the size of an element, the bytes of all, the bytes of a block and
the bytes as stored. The place of each block follows. A block is one stream or one a byte of an
element; each has four bytes of length, and is stored as it is if that is what it unfolds to. Bytes,
or bits, of equal weight may stand together in a block (shuffle).

Decoded are LZ4, zlib and zstd. Every length is checked before anything of it is held, so that a
buffer that lies is damage and never memory.

Source: c-blosc 1.21 `README_CHUNK_FORMAT.rst`, `blosc/blosc.c`, `blosc/shuffle.c`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from importlib import import_module

from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.packages import needing
from ftckpt.workers.budget import demand

_HEADER, _START = 16, 4
_BYTES, _COPIED, _BITS, _WHOLE = 1, 2, 4, 16  # flags
_NAMES = ("blosclz", "lz4", "snappy", "zlib", "zstd")
_MOST_STREAMS, _LEAST_STREAM = 16, 128
_GROWTH = 5  # copies of a block that are held while its bits are sorted


def decode_blosc(raw: bytes, *, file: str = "") -> Iterator[bytes]:
    """Yield the content of a buffer, a block at a time.

    Raises:
        CorruptError: it contradicts itself, or a block is damaged (`bad-transform`).
        UnsupportedError: a version or compressor that is not decoded.
        NoResourceError: its blocks need more memory than is allowed.
    """

    def damaged(said: str) -> CorruptError:
        return CorruptError(
            f"{file or 'a record'} holds a Blosc buffer that {said}",
            kind="bad-transform", file=file or None,
        )  # fmt: skip

    if len(raw) < _HEADER:
        raise damaged(f"has {len(raw)} bytes")
    version, _, flags, width = raw[:4]
    nbytes, size, stored = (int.from_bytes(raw[at : at + 4], "little") for at in (4, 8, 12))
    if version != 2:
        raise UnsupportedError(
            f"{file or 'a record'} is of Blosc's format {version}, which is not read",
            file=file or None,
        )
    if stored != len(raw):
        raise damaged(f"says that it has {stored} bytes and has {len(raw)}")
    if flags & _COPIED:
        if nbytes != stored - _HEADER:
            raise damaged(f"holds {stored - _HEADER} bytes as they are, of {nbytes}")
        yield raw[_HEADER:]
        return
    if not nbytes:
        return
    if not width or not 0 < size <= nbytes:
        raise damaged(f"has blocks of {size} bytes and elements of {width}")
    blocks = -(-nbytes // size)
    first = _HEADER + blocks * _START
    if first > stored:
        raise damaged(f"has room for fewer than {blocks} blocks")
    demand(size * _GROWTH, f"a block of {size >> 20} MiB of {file or 'a record'}")
    unpack = _unpacker(flags >> 5, file)
    for number in range(blocks):
        length = min(size, nbytes - number * size)
        at = int.from_bytes(raw[_HEADER + number * _START :][:_START], "little")
        split = not flags & _WHOLE and length == size and width <= _MOST_STREAMS
        streams = width if split and size // width >= _LEAST_STREAM else 1
        each, rest = divmod(length, streams)
        if rest:
            raise damaged("has a block that its elements do not divide")
        parts = []
        for _ in range(streams):
            end = at + _START
            held = int.from_bytes(raw[at:end], "little")
            if at < first or not 0 < held <= stored - end:
                raise damaged("has a block beyond its end")
            at = end + held
            part = raw[end:at] if held == each else unpack(raw[end:at], each)
            if len(part) != each:
                raise damaged(f"has a block that does not unfold to {each} bytes")
            parts.append(part)
        yield _unshuffled(b"".join(parts), flags, width)


def _unpacker(number: int, file: str) -> Callable[[bytes, int], bytes]:
    """Return what undoes a compressor: bytes of another length than asked for are damage."""
    name = _NAMES[number] if number < len(_NAMES) else str(number)
    if name == "zlib":
        return _unzlib
    if name == "zstd":
        return _unzstd
    if name == "lz4":
        with needing("Blosc's LZ4"):
            import_module("lz4.block")
        return _unlz4
    raise UnsupportedError(
        f"{file or 'a record'} is compressed with Blosc's {name}, which is not read",
        hint="write it again with lz4, zstd or zlib inside",
        file=file or None,
    )


def _unzlib(data: bytes, length: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, length + 1)
    except zlib.error:
        return b""


def _unzstd(data: bytes, length: int) -> bytes:
    import zstandard

    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            return bytes(reader.read(length + 1))
    except zstandard.ZstdError:
        return b""


def _unlz4(data: bytes, length: int) -> bytes:
    import lz4.block

    try:
        return bytes(lz4.block.decompress(data, uncompressed_size=length))
    except lz4.block.LZ4BlockError:
        return b""


def _unshuffled(data: bytes, flags: int, width: int) -> bytes:
    """Return a block with the bytes of each element together; what is left over stays."""
    count = len(data) // width
    if flags & _BYTES and width > 1 and count:
        import numpy as np

        whole = np.frombuffer(data, np.uint8, count * width).reshape(width, count)
        return whole.T.tobytes() + data[count * width :]
    if flags & _BITS and count and count % 8 == 0:
        import numpy as np

        whole = np.frombuffer(data, np.uint8, count * width).reshape(width * 8, count // 8)
        bits = np.unpackbits(whole, axis=1, bitorder="little").reshape(width, 8, count)
        packed = np.packbits(bits, axis=1, bitorder="little").reshape(width, count)
        return packed.T.tobytes() + data[count * width :]
    return data
