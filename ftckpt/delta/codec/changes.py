"""Words of which most are as the reference has them: where the others are, and by how much.

Where few have changed, the places are the gaps between them, a byte each; where many have, one bit
a word is shorter. The differences are zigzag words (`ftckpt.delta.codec.words`) in byte planes.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from .entropy import compress, damaged, decompress
from .planes import WORTH, Planes, WordCutter, pack, unpack
from .words import as_words, difference, undo_difference

if TYPE_CHECKING:
    from .words import Array

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
