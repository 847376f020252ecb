"""Turn elements into unsigned words, so that what is predictable lies together.

Everything here works on bits, never on values, so every type is lossless: NaN payloads, -0.0 and
padding bits come back as they were. All words are little-endian.

- **rotate**: one bit to the left, around the end. A float's exponent then fills whole bytes and its
  sign joins the mantissa, which is noise anyway.
- **zigzag**: a two's-complement difference as a number that is small where the difference is:
  0, -1, 1, -2, … become 0, 1, 2, 3, …
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.checkpoint.dtypes import DType
from ftckpt.workers.buffers import buffer

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# Slots of this thread's memory (`ftckpt.workers.buffers`); other users of it have numbers below 16.
# A fill may decode another delta in the same thread: what it is given is none of these.
WORDS, SHIFTED, PLANE, PAYLOAD, LEFT, RIGHT, GUESS, EXPECTED = range(16, 24)


class Words(NamedTuple):
    """How the elements of a type are cut into words.

    Attributes:
        size: bytes of a word: 1, 2, 4 or 8.
        each: words of an element; 2 where it is complex.
        rotates: whether a word is a float with exponent bits to gather.
    """

    size: int
    each: int
    rotates: bool


@cache  # there are a dozen types, and it is asked many times for each block
def words_of(dtype: DType) -> Words:
    """Return how a type is cut; of types smaller than a byte the packed bytes are the words."""
    if dtype.family == "complex":
        return Words(dtype.itemsize // 2, 2, True)
    size = max(1, dtype.itemsize)
    return Words(size, 1, dtype.family == "float" and size > 1)


def word_count(dtype: DType, elements: int) -> int:
    """Return how many words the elements of a dense tensor make."""
    words = words_of(dtype)
    return dtype.nbytes(elements) // words.size


def as_words(data: Any, size: int) -> Array:
    """Return the bytes of a buffer as words; nothing is copied.

    Args:
        data: dense and little-endian; a multiple of `size` bytes.
        size: bytes of a word.
    """
    import numpy as np

    return np.frombuffer(data, f"<u{size}")


class _Scratch(threading.local):
    """The array that each slot was last asked for: to make one takes longer than to find it."""

    def __init__(self) -> None:
        self.arrays: dict[int, Array] = {}


_scratch = _Scratch()


def scratch(count: int, size: int, slot: int) -> Array:
    """Return `count` words of this thread's memory; the next call with the slot takes it again."""
    array = _scratch.arrays.get(slot)
    if array is None or array.size != count or array.itemsize != size:
        array = _scratch.arrays[slot] = as_words(buffer(count * size, slot), size)
    return array


def rotate(words: Array, out: Array) -> Array:
    """Put each word, its bits rotated left by one, into `out`."""
    import numpy as np

    top = np.right_shift(words, 8 * words.itemsize - 1, out=_shifted(words))
    np.left_shift(words, 1, out=out)
    np.bitwise_or(out, top, out=out)
    return out


def unrotate(words: Array, out: Array) -> Array:
    """Undo `rotate`; `out` may be `words`."""
    import numpy as np

    low = np.left_shift(words, 8 * words.itemsize - 1, out=_shifted(words))
    np.right_shift(words, 1, out=out)
    np.bitwise_or(out, low, out=out)
    return out


def difference(words: Array, reference: Array, out: Array) -> Array:
    """Put the zigzag of `words - reference`, modulo the word, into `out`."""
    import numpy as np

    np.subtract(words, reference, out=out)
    sign = _shifted(words)
    signed = np.dtype(f"<i{words.itemsize}")
    np.right_shift(out.view(signed), 8 * words.itemsize - 1, out=sign.view(signed))
    np.left_shift(out, 1, out=out)
    np.bitwise_xor(out, sign, out=out)
    return out


def undo_difference(words: Array, reference: Array, out: Array) -> Array:
    """Undo `difference`; `out` may be `words`."""
    import numpy as np

    sign = np.bitwise_and(words, 1, out=_shifted(words))
    np.negative(sign, out=sign)
    np.right_shift(words, 1, out=out)
    np.bitwise_xor(out, sign, out=out)
    np.add(out, reference, out=out)
    return out


def _shifted(like: Array) -> Array:
    return scratch(like.size, like.itemsize, SHIFTED)
