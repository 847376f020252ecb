"""Words stored byte by byte: all lowest bytes, all second bytes, …, each plane coded by itself.

A block is coded chunk by chunk, so that everything between the words and the frames stays in the
processor's cache. `docs/delta-format.md` has the layout.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ftckpt.workers.buffers import buffer

from .entropy import Coder, compress, damaged, decompress
from .words import PAYLOAD, PLANE, SHIFTED, WORDS, as_words, scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .words import Array

CHUNK = 256 << 10  # words; the last chunk of a block may be shorter
_TABLES = [struct.Struct(f"<{count}I") for count in range(9)]  # by how many planes are separate
JOINED = (0, 2, 4)
_SMALL = 128 << 10  # bytes that are copied sooner than other threads get the interpreter's lock
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


class RotatedCutter:
    """Cuts words rotated left by a bit, which are never made: but for the lowest they are shifts.

    Args:
        words: as they are.
    """

    def __init__(self, words: Array) -> None:
        self._words = words

    def turn_to(self, start: int, stop: int) -> None:
        """Make words `start` to `stop` those that are cut."""
        self._chunk = self._words[start:stop]

    def cut(self, place: int, out: Array) -> None:
        """Put the bytes of each of these words from a place on into its word of `out`."""
        import numpy as np

        chunk = self._chunk
        if place:
            # The top bit, which the rotation takes away, falls out of the cast.
            np.right_shift(chunk, 8 * place - 1, out=out, casting="unsafe", dtype=chunk.dtype)
            return
        top = scratch(out.size, out.itemsize, SHIFTED)
        bits = 8 * chunk.itemsize
        np.right_shift(chunk, bits - 1, out=top, casting="unsafe", dtype=chunk.dtype)
        np.left_shift(chunk, 1, out=out, casting="unsafe", dtype=chunk.dtype)
        np.bitwise_or(out, top, out=out)


def pack(count: int, size: int, words: Cutter, planes: Planes) -> memoryview:
    """Return the payload that holds `count` words; the next call of this thread overwrites it.

    Args:
        count: of words.
        size: bytes of a word.
        words: gives their bytes.
        planes: how they are stored.
    """
    separate = range(planes.joined, size)
    table = _TABLES[len(separate)]
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
    table = _TABLES[len(separate)]
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
        _gather(parts, joined, chunk)
        finish(start, stop)
    if at != len(payload):
        raise damaged("bytes follow its last plane")


def _gather(parts: Sequence[Array | None], joined: int, out: Array) -> None:
    """Put words together from their parts, the lowest first; None is a part of 0.

    Each half of a word is put together first, so that most passes are over narrower words, which
    NumPy widens while they are in the nearest cache.

    Args:
        parts: of the words.
        joined: bytes of the first part, where it is not a plane; else 0.
        out: the words.
    """
    import numpy as np

    if all(part is None for part in parts[1:]):
        out[...] = 0 if parts[0] is None else parts[0]
        return
    half = out.itemsize // 2
    lower = half - joined + 1 if joined else half  # parts that are below the middle of a word
    high = _half(parts[lower:], 0, out.size, half)
    if high is not None:
        np.left_shift(high, 8 * half, out=out, dtype=out.dtype)
    low = _half(parts[:lower], joined, out.size, half)
    if high is None:
        out[...] = low
    elif low is not None:
        np.bitwise_or(out, low, out=out)


def _half(parts: Sequence[Array | None], joined: int, count: int, size: int) -> Array | None:
    """Return halves of words, no wider than they are; None where all are 0."""
    if all(part is None for part in parts[1:]):
        return parts[0]
    out = scratch(count, size, WORDS if size > 2 else PLANE)
    _gather(parts, joined, out)
    return out


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
            if len(frame) > _SMALL:
                room[: len(frame)] = as_words(frame, 1)
            else:
                room.data[: len(frame)] = frame
            return len(frame)
        room[...] = dense
    return room.size


def _take(payload: memoryview, at: int, length: int) -> memoryview:
    if at + length > len(payload):
        raise damaged("it ends inside a plane")
    return payload[at : at + length]
