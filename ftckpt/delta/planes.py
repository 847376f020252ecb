"""Words stored byte by byte: all lowest bytes, all second bytes, …, each plane coded by itself.

A block is coded chunk by chunk, so that everything between the words and the frames stays in the
processor's cache. `docs/delta-format.md` has the layout.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.buffers import buffer

from .entropy import Coder, compress, damaged, decompress
from .words import PAYLOAD, PLANE, SHIFTED, WORDS, as_words, scratch

if TYPE_CHECKING:
    from collections.abc import Callable

    from .words import Array

CHUNK = 256 << 10  # words; the last chunk of a block may be shorter
JOINED = (0, 2, 4)
WORTH = 0.99  # a frame that saves less than this leaves is not worth its decoding


class Planes(NamedTuple):
    """How the planes of a tensor are stored.

    Attributes:
        joined: how many of the lowest bytes of each word stay together as they are: noise that
            nothing can shrink is copied fastest so. 0, 2 or 4, and less than a word.
        plain: planes that are not worth trying, by number.
        coders: by plane; `HUFFMAN` where there is none.
    """

    joined: int = 0
    plain: frozenset[int] = frozenset()
    coders: tuple[Coder, ...] = ()


def pack(count: int, size: int, words: Callable[[int, int, Array], Array], planes: Planes) -> bytes:
    """Return the payload that holds `count` words.

    Args:
        count: of words.
        size: bytes of a word.
        words: puts words `start` to `stop` into an array of this thread's memory.
        planes: how they are stored.
    """
    separate = range(planes.joined, size)
    table = struct.Struct(f"<{len(separate)}I")
    chunks = -(-count // CHUNK)
    at = 1 + chunks * table.size
    # Every plane is stored plain where its frame is larger, so that this is the most there can be.
    payload = buffer(at + count * size, PAYLOAD)
    payload[0] = planes.joined
    for number in range(chunks):
        start = number * CHUNK
        stop = min(count, start + CHUNK)
        chunk = words(start, stop, scratch(stop - start, size, WORDS))
        if planes.joined:
            end = at + chunk.size * planes.joined
            _cut(chunk, 0, as_words(payload[at:end], planes.joined))
            at = end
        top = int(chunk.max())
        lengths = []
        for plane in separate:
            length = 0
            if top >> 8 * plane:
                length = _put(chunk, plane, planes, payload, at)
            lengths.append(length)
            at += length
        table.pack_into(payload, 1 + number * table.size, *lengths)
    return bytes(payload[:at])


def unpack(
    payload: memoryview, count: int, size: int, out: Array, finish: Callable[[int, int], None]
) -> None:
    """Put the words of a payload into `out`.

    Args:
        payload: all of it; anything may stand there.
        count: of words that it must hold.
        size: bytes of a word.
        out: `count` words.
        finish: is called when words `start` to `stop` are in place, while they are in the cache.

    Raises:
        CorruptError: it does not hold exactly these (`bad-delta`).
    """
    joined = payload[0] if len(payload) else size
    if joined not in JOINED or joined >= size:
        raise damaged("its planes are joined as no encoder joins them")
    separate = range(joined, size)
    table = struct.Struct(f"<{len(separate)}I")
    chunks = -(-count // CHUNK)
    at = 1 + chunks * table.size
    if at > len(payload):
        raise damaged("it ends inside the table of its planes")
    for number in range(chunks):
        start = number * CHUNK
        stop = min(count, start + CHUNK)
        chunk = out[start:stop]
        parts: list[Array | None] = []
        if joined:
            low = _take(payload, at, (stop - start) * joined)
            at += len(low)
            parts.append(as_words(low, joined))
        for length in table.unpack_from(payload, 1 + number * table.size):
            if length > stop - start:
                raise damaged("a plane is longer than its words")
            stored = _take(payload, at, length)
            at += length
            if length in (0, stop - start):
                parts.append(as_words(stored, 1) if length else None)
            else:
                parts.append(as_words(decompress(stored, stop - start), 1))
        _gather(parts, chunk)
        finish(start, stop)
    if at != len(payload):
        raise damaged("bytes follow its last plane")


def _cut(chunk: Array, plane: int, out: Array) -> None:
    """Put the bytes of each word from a place on into `out`; shift and cast beat strided copies."""
    import numpy as np

    shifted = chunk
    if plane:
        shifted = scratch(chunk.size, chunk.itemsize, SHIFTED)
        np.right_shift(chunk, chunk.dtype.type(8 * plane), out=shifted)
    np.copyto(out, shifted, casting="unsafe")


def _gather(parts: list[Array | None], out: Array) -> None:
    """Undo `_cut`: put words together from their parts, the lowest first; None is a part of 0."""
    import numpy as np

    wide = scratch(out.size, out.itemsize, SHIFTED)
    begun = False
    for part in reversed(parts):
        if begun:
            np.left_shift(out, out.dtype.type(8 * (1 if part is None else part.itemsize)), out=out)
        if part is None:
            continue
        if begun:
            np.copyto(wide, part)
            np.bitwise_or(out, wide, out=out)
        else:
            np.copyto(out, part)
            begun = True
    if not begun:
        out[...] = out.dtype.type(0)


def _put(chunk: Array, plane: int, planes: Planes, payload: memoryview, at: int) -> int:
    """Store one plane at `at`, as a frame or plain; return its length."""
    size = chunk.size
    stored = as_words(payload[at : at + size], 1)
    if plane in planes.plain:
        _cut(chunk, plane, stored)
        return size
    dense = scratch(size, 1, PLANE)
    _cut(chunk, plane, dense)
    frame = compress(dense, planes.coders[plane] if planes.coders else Coder.HUFFMAN)
    if len(frame) >= WORTH * size:
        stored[...] = dense
        return size
    payload[at : at + len(frame)] = frame
    return len(frame)


def _take(payload: memoryview, at: int, length: int) -> memoryview:
    if at + length > len(payload):
        raise damaged("it ends inside a plane")
    return payload[at : at + length]
