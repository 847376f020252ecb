"""Bytes through zstandard, used as a coder of single bytes.

A plane of exponents has few repeats and much skew. With a match table of 64 entries zstd's fast
strategy finds next to no matches, so each block of 128 KiB becomes a histogram and four Huffman
streams: better and three times faster than an ordinary level on such bytes. The frames are plain
zstd (RFC 8878), with their content size.
"""

from __future__ import annotations

import threading
from enum import IntEnum
from typing import Any

from ftckpt.errors import CorruptError


class Coder(IntEnum):
    """How hard matches are looked for; every decoder reads all of them."""

    HUFFMAN = 0
    MATCHES = 1
    THOROUGH = 9


class _Kept(threading.local):
    """What a thread makes once, because it takes longer than a small plane."""

    def __init__(self) -> None:
        self.compressors: dict[Coder, Any] = {}
        self.decompressor: Any = None


_kept = _Kept()


def compress(data: Any, coder: Coder = Coder.HUFFMAN) -> bytes:
    """Return one zstd frame that holds `data`, its size recorded and without a checksum."""
    compressor = _kept.compressors.get(coder)
    if compressor is None:
        compressor = _kept.compressors[coder] = _compressor(coder)
    frame: bytes = compressor.compress(data)
    return frame


def decompress(frame: Any, length: int) -> bytes:
    """Return the content of one frame, which must be of `length` bytes and say so.

    Nothing is allocated before the frame's own size is known to be the right one.

    Raises:
        CorruptError: it is not a single frame of that length (`bad-delta`).
    """
    import zstandard

    try:
        said = zstandard.get_frame_parameters(frame).content_size
        if said != length:
            raise damaged(f"a frame unfolds to {said} bytes where {length} are needed")
        decompressor = _kept.decompressor
        if decompressor is None:
            decompressor = _kept.decompressor = zstandard.ZstdDecompressor()
        data: bytes = decompressor.decompress(frame, max_output_size=length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise damaged(f"a frame cannot be decompressed: {error}") from None
    if len(data) != length:
        raise damaged(f"a frame unfolds to {len(data)} bytes where {length} are needed")
    return data


def damaged(why: str) -> CorruptError:
    """Return the error for a block that cannot be what an encoder made."""
    return CorruptError(f"a block of a delta is damaged: {why}", kind="bad-delta")


def _compressor(coder: Coder) -> Any:
    import zstandard

    if coder is not Coder.HUFFMAN:
        return zstandard.ZstdCompressor(level=int(coder))
    # A `target_length` above 0 would turn Huffman coding off.
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, strategy=zstandard.STRATEGY_FAST, hash_log=6, window_log=17, min_match=7
    )
    return zstandard.ZstdCompressor(compression_params=parameters)
