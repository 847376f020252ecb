"""Words stored byte by byte: all lowest bytes, all second bytes, …, each plane coded by itself.

A block is coded chunk by chunk, so that everything between the words and the frames stays in the
processor's cache. `docs/delta-format.md` has the layout.

Bytes through zstandard, used as a coder of single bytes.

A plane of exponents has few repeats and much skew. With a match table of 64 entries zstd's fast
strategy finds next to no matches, so each block of 128 KiB becomes a histogram and four Huffman
streams: better and three times faster than an ordinary level on such bytes. The frames are plain
zstd (RFC 8878), with their content size.

Words of which most are as the reference has them: where the others are, and by how much.

Where few have changed, the places are the gaps between them, a byte each; where many have, one bit
a word is shorter. The differences are zigzag words (`ftckpt.delta.codec.words`) in byte planes.
"""

from __future__ import annotations

import struct
import threading
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ftckpt.errors import CorruptError
from ftckpt.workers.buffers import buffer

from .words import PAYLOAD, PLANE, SHIFTED, WORDS, as_words, difference, scratch, undo_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .words import Array


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


_HEAD = struct.Struct("<III")  # words that have changed; bytes of their places, plain and stored
_ESCAPE = 255  # a gap of this many words, and then the rest of the gap


def pack_changes(words: Array, reference: Array, *, gaps: bool) -> bytes:
    """Return the payload that holds what differs between two arrays of words.

    Args:
        words: to be stored; fewer than 2^32.
        reference: as many, which the reader will have.
        gaps: whether places are gaps, or else a bit a word.
    """
    import numpy as np

    changed = words != reference
    places = np.flatnonzero(changed)
    plain = _gaps(places) if gaps else np.packbits(changed, bitorder="little")
    coded = compress(plain) if plain.size else b""
    if len(coded) >= WORTH * plain.size:
        coded = plain.tobytes()
    apart = np.empty(places.size, words.dtype)
    difference(words[places], reference[places], apart)
    cutter = WordCutter(words.itemsize, lambda start, stop, _: apart[start:stop])
    values = pack(apart.size, words.itemsize, cutter, Planes())
    return _HEAD.pack(places.size, plain.size, len(coded)) + coded + values


def unpack_changes(payload: memoryview, reference: Array, out: Array, *, gaps: bool) -> None:
    """Put the words of a payload into `out`.

    Args:
        payload: all of it; anything may stand there.
        reference: as it was when the payload was made.
        out: as many words.
        gaps: as it was made.

    Raises:
        CorruptError: it cannot be of as many words (`bad-delta`).
    """
    import numpy as np

    if len(payload) < _HEAD.size:
        raise damaged("it ends inside its head")
    changed, plain, stored = _HEAD.unpack_from(payload)
    # No encoder escapes more often than there are words to skip.
    most = changed + out.size // _ESCAPE if gaps else -(-out.size // 8)
    if changed > out.size or plain > most or (not gaps and plain != most):
        raise damaged("it counts more changes than there are words")
    rest = payload[_HEAD.size :]
    if stored > min(plain, len(rest)):
        raise damaged("it ends inside the places of its changes")
    coded = rest[:stored]
    data = as_words(coded if stored == plain else decompress(coded, plain), 1)
    places = _places(data, out.size) if gaps else _set_bits(data, out.size)
    if places.size != changed:
        raise damaged(f"it has {places.size} places for {changed} changes")
    apart = np.empty(changed, out.dtype)
    unpack(rest[stored:], changed, out.itemsize, apart, lambda start, stop: None)
    out[...] = reference
    out[places] = undo_difference(apart, reference[places], apart)


def _gaps(places: Array) -> Array:
    """Return the words between each place and the one before, as bytes with escapes."""
    import numpy as np

    gaps = np.diff(places, prepend=-1) - 1
    escapes = gaps // _ESCAPE
    ends = np.cumsum(escapes + 1)
    result = np.full(int(ends[-1]) if ends.size else 0, _ESCAPE, np.uint8)
    result[ends - 1] = gaps % _ESCAPE
    return result


def _places(gaps: Array, count: int) -> Array:
    """Undo `_gaps`."""
    import numpy as np

    if gaps.size and gaps[-1] == _ESCAPE:
        raise damaged("its last gap has no end")
    steps = gaps.astype(np.int64)
    last = gaps != _ESCAPE
    places: Array = np.cumsum(steps + last)[last] - 1
    if places.size and places[-1] >= count:
        raise damaged("a change lies behind its last word")
    return places


def _set_bits(mask: Array, count: int) -> Array:
    import numpy as np

    bits = np.unpackbits(mask, bitorder="little")
    if bits[count:].any():
        raise damaged("a change lies behind its last word")
    return np.flatnonzero(bits.view(np.bool_))  # bytes are searched slower
