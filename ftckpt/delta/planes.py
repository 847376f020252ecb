"""Words stored byte by byte: all lowest bytes, all second bytes, …, each plane coded by itself.

A block is coded chunk by chunk, so that everything between the words and the frames stays in the
processor's cache. `docs/delta-format.md` has the layout.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ftckpt.buffers import buffer

from .entropy import Coder, compress, damaged, decompress
from .words import PAYLOAD, PLANE, SHIFTED, WORDS, as_words, scratch

if TYPE_CHECKING:
    from collections.abc import Callable

    from .words import Array

CHUNK = 256 << 10  # words; the last chunk of a block may be shorter
JOINED = (0, 2, 4)
_GLANCE = 256  # bytes that are looked at before all are: few planes are of zeros
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


class Cutter(Protocol):
    """Words that are cut into their bytes, chunk by chunk."""

    def turn_to(self, start: int, stop: int) -> None:
        """Make words `start` to `stop` those that are cut."""

    def cut(self, place: int, out: Array) -> None:
        """Put the bytes of each of these words from a place on into its word of `out`."""


class WordCutter:
    """Cuts words on the processor, while they are in its cache.

    Args:
        size: bytes of a word.
        words: returns words `start` to `stop`, in the given array or their own.
    """

    def __init__(self, size: int, words: Callable[[int, int, Array], Array]) -> None:
        self._size = size
        self._words = words

    def turn_to(self, start: int, stop: int) -> None:
        """Make words `start` to `stop` those that are cut."""
        self._chunk = self._words(start, stop, scratch(stop - start, self._size, WORDS))

    def cut(self, place: int, out: Array) -> None:
        """Put the bytes of each of these words from a place on into its word of `out`."""
        import numpy as np

        chunk = self._chunk
        if not place:
            np.copyto(out, chunk, casting="unsafe")
            return
        # NumPy casts what is shifted while it is in the nearest cache; strided copies are slower.
        np.right_shift(chunk, 8 * place, out=out, casting="unsafe", dtype=chunk.dtype)


def pack(count: int, size: int, words: Cutter, planes: Planes) -> memoryview:
    """Return the payload that holds `count` words; the next call of this thread overwrites it.

    Args:
        count: of words.
        size: bytes of a word.
        words: gives their bytes.
        planes: how they are stored.
    """
    separate = range(planes.joined, size)
    table = struct.Struct(f"<{len(separate)}I")
    chunks = -(-count // CHUNK)
    at = 1 + chunks * table.size
    # Every plane is stored plain where its frame is larger, so that this is the most there can be.
    payload = buffer(at + count * size, PAYLOAD)
    room = as_words(payload, 1)
    payload[0] = planes.joined
    for number in range(chunks):
        start = number * CHUNK
        stop = min(count, start + CHUNK)
        words.turn_to(start, stop)
        if planes.joined:
            end = at + (stop - start) * planes.joined
            words.cut(0, room[at:end].view(f"<u{planes.joined}"))
            at = end
        lengths = []
        for plane in separate:
            length = _put(words, plane, planes, room[at : at + stop - start])
            lengths.append(length)
            at += length
        table.pack_into(payload, 1 + number * table.size, *lengths)
    return payload[:at]


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


def _gather(parts: list[Array | None], out: Array) -> None:
    """Put words together from their parts, the lowest first; None is a part of 0."""
    import numpy as np

    wide = scratch(out.size, out.itemsize, SHIFTED)
    begun = False
    bits = 0  # by which what is in place has yet to be shifted
    for part in reversed(parts):
        bits += 8 * (1 if part is None else part.itemsize)
        if part is None:
            continue
        if begun:
            np.left_shift(out, bits, out=out)
            np.copyto(wide, part)
            np.bitwise_or(out, wide, out=out)
        else:
            np.copyto(out, part)
            begun = True
        bits = 0
    if not begun:
        out[...] = 0
    elif bits:
        np.left_shift(out, bits, out=out)


def _put(words: Cutter, plane: int, planes: Planes, room: Array) -> int:
    """Store one plane, as a frame or plain, in room for it as it is; return its length."""
    coded = plane not in planes.plain
    dense = scratch(room.size, 1, PLANE) if coded else room
    words.cut(plane, dense)
    # A glance in the interpreter's own bytes: NumPy would let another thread go first.
    if not any(dense[:_GLANCE].tobytes()) and not dense.any():
        return 0
    if coded:
        frame = compress(dense, planes.coders[plane] if planes.coders else Coder.HUFFMAN)
        if len(frame) < WORTH * room.size:
            room[: len(frame)] = as_words(frame, 1)
            return len(frame)
        room[...] = dense
    return room.size


def _take(payload: memoryview, at: int, length: int) -> memoryview:
    if at + length > len(payload):
        raise damaged("it ends inside a plane")
    return payload[at : at + length]
