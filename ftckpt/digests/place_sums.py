"""Sums of a tensor's bytes by their places in it, for proofs at the speed of memory.

Source and result of a transfer hold the same elements in other files, in other pieces, in another
order. A place sum depends on none of that: every byte counts with its place in the tensor's C
order, so that what is read here in rows and there in columns has one sum, and an element that
lies in a wrong place has another.

    r, c  the row of a byte (all axes but the last, in C order) and its place in that row;
          axes at the end whose rows have less than 256 bytes are one axis with that before them
    w     the little-endian 64-bit word at c // 8, of the bytes that are given; the others are zero
    k     mix(r) * mix(b) * key[i], where b, i = divmod(c // 8, 8192)
    low = sum of k * w,  high = sum of k' * (w >> 32)

All arithmetic is modulo 2^64, and `mix` and the keys are odd and random. The sums are linear in the
bytes: parts of words add up, and zeros (padding) add nothing. `low` alone would not see two bytes
that change by 2^63 each; `high` is there for the upper halves of words. A fault that touches a
single byte of each word goes unseen once in 2^40, any other far less often.

The tensor digest (`ftckpt.digests.tensors`), which is written down and compared later, mixes every
element by itself and is some five times slower. Place sums live as long as one transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.extents import Box
from ftckpt.workers.buffers import buffer

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_MASK = (1 << 64) - 1
_COLUMNS = 8192  # words with keys of their own: 64 KiB, so that they stay in the processor's cache
_SHORT = 256  # bytes of a row that is too short to be one
_STEP = 64 << 10  # words summed at once; these and their upper halves stay in the cache too
_WORDS_SLOT, _UPPER_SLOT = 32, 33


class PlaceSum(NamedTuple):
    """The sum of some bytes of a tensor.

    Attributes:
        nbytes: how many.
        low: of all words.
        high: of their upper halves.
    """

    nbytes: int = 0
    low: int = 0
    high: int = 0

    def plus(self, other: PlaceSum) -> PlaceSum:
        """Return the sum of both; they have no byte in common."""
        nbytes, low, high = other
        return PlaceSum(self.nbytes + nbytes, self.low + low & _MASK, self.high + high & _MASK)


def has_rows(shape: Sequence[int], itemsize: int, box: Box) -> bool:
    """Say whether a box of a tensor is made of whole rows or of equal parts of rows.

    It is not where it cuts a very short axis at the end; `sum_in_box` cannot sum it up.
    """
    axis, length = len(shape) - 1, itemsize
    while axis > 0 and length * shape[axis] < _SHORT:
        if box.sizes[axis] != shape[axis]:
            return False
        length *= shape[axis]
        axis -= 1
    return True


def sum_in_box(
    shape: Sequence[int], itemsize: int, box: Box, at: int, data: memoryview
) -> PlaceSum:
    """Sum up bytes of a box of a tensor; they may cut elements.

    Args:
        shape: of the tensor.
        itemsize: bytes of an element.
        box: in the tensor, with some volume; `has_rows` of it.
        at: where in the box's dense C order the bytes begin.
        data: the bytes, which do not go beyond the box.
    """
    if not shape:
        shape, box = (1,), Box((0,), (1,))
    while len(shape) > 1 and shape[-1] * itemsize < _SHORT:
        itemsize *= shape[-1]
        shape, box = shape[:-1], Box(box.offsets[:-1], box.sizes[:-1])
    length = box.sizes[-1] * itemsize
    first = box.offsets[-1] * itemsize
    total, done = PlaceSum(len(data)), 0
    row, column = divmod(at, length)
    if column:
        done = min(length - column, len(data))
        part = _sum_rows(data[:done], done, _rows(shape, box, row, 1), first + column)
        total = total.plus(part)
        row += 1
    if whole := (len(data) - done) // length:
        end = done + whole * length
        part = _sum_rows(data[done:end], length, _rows(shape, box, row, whole), first)
        total, done, row = total.plus(part), end, row + whole
    if done < len(data):
        rest = data[done:]
        total = total.plus(_sum_rows(rest, len(rest), _rows(shape, box, row, 1), first))
    return total


def _sum_rows(data: memoryview, length: int, rows: Array, first: int) -> PlaceSum:
    """Sum up `length` bytes of each of some rows, which begin at byte `first` of them."""
    import numpy as np

    column, cut = divmod(first, 8)
    width = -(-(cut + length) // 8)
    if width > _COLUMNS:  # each by itself: it has several keys of rows
        low = high = 0
        for number, key in enumerate(_mixed_of(rows)):
            sums = _sum_long(data[number * length : (number + 1) * length], first)
            mixed = int(key)
            low, high = low + sums[0] * mixed & _MASK, high + sums[1] * mixed & _MASK
        return PlaceSum(0, low, high)
    low = high = 0
    step = max(1, _STEP // width)
    for begin in range(0, len(rows), step):
        some = rows[begin : begin + step]
        part = data[begin * length : (begin + len(some)) * length]
        words = _words(part, len(some), length, cut, width)
        keys = _mixed_of(some)
        one, two = _dots(words, column)
        low, high = low + int(np.dot(one, keys)) & _MASK, high + int(np.dot(two, keys)) & _MASK
    return PlaceSum(0, low, high)


def _sum_long(data: memoryview, first: int) -> tuple[int, int]:
    """Return both sums of a run of one row, without the row's own key."""
    import numpy as np

    low = high = done = 0
    while done < len(data):
        column, cut = divmod(first + done, 8)
        inside = column % _COLUMNS
        if cut or inside or len(data) - done < 8 * _COLUMNS:
            count = min(len(data) - done, 8 * (_COLUMNS - inside) - cut)
            rows = 1
        else:
            rows = min((len(data) - done) // (8 * _COLUMNS), _STEP // _COLUMNS)
            count = rows * 8 * _COLUMNS
        length = count // rows
        words = _words(data[done : done + count], rows, length, cut, -(-(cut + length) // 8))
        one, two = _bare(words, inside)
        mixed = _mixed(column // _COLUMNS, rows)
        low = low + int(np.dot(one, mixed)) & _MASK
        high = high + int(np.dot(two, mixed)) & _MASK
        done += count
    return low, high


def _dots(words: Array, column: int) -> tuple[Array, Array]:
    """Return both sums of each row of words that begins at a column, of a block at most.

    They are without the rows' own keys.
    """
    import numpy as np

    block, inside = divmod(column, _COLUMNS)
    one = two = np.zeros(len(words), np.uint64)
    at = 0
    while at < words.shape[1]:
        end = min(words.shape[1], at + _COLUMNS - inside)
        part = words if not at and end == words.shape[1] else np.ascontiguousarray(words[:, at:end])
        more = _bare(part, inside)
        key = _mixed(block, 1)
        one, two = one + more[0] * key, two + more[1] * key
        at, block, inside = end, block + 1, 0
    return one, two


def _bare(words: Array, inside: int) -> tuple[Array, Array]:
    """Return both sums of each row of words inside one block of keys."""
    import numpy as np

    low, high = _keys()
    shape = words.shape
    upper = np.frombuffer(buffer(8 * words.size, _UPPER_SLOT), np.uint64).reshape(shape)
    np.right_shift(words, np.uint64(32), out=upper)
    here = slice(inside, inside + shape[1])
    return np.dot(words, low[here]), np.dot(upper, high[here])


def _words(data: memoryview, rows: int, length: int, cut: int, width: int) -> Array:
    """Return rows of bytes as rows of words, with zeros before and behind."""
    import numpy as np

    if not cut and not length % 8:
        return np.frombuffer(data, "<u8").reshape(rows, width)
    padded = np.frombuffer(buffer(8 * rows * width, _WORDS_SLOT), np.uint8)
    padded = padded.reshape(rows, 8 * width)
    padded[:, :cut] = 0
    padded[:, cut : cut + length] = np.frombuffer(data, np.uint8).reshape(rows, length)
    padded[:, cut + length :] = 0
    return padded.view("<u8")


def _rows(shape: Sequence[int], box: Box, first: int, count: int) -> Array:
    """Return which rows of a tensor the rows `first`, `first + 1`, … of a box are."""
    import numpy as np

    outer = len(shape) - 1
    while outer and box.sizes[outer - 1] == shape[outer - 1]:
        outer -= 1  # these axes are whole: their rows follow each other
    inner = prod(shape[outer:-1])
    left = np.arange(first, first + count, dtype=np.int64)
    found, stride = left, inner
    if outer:
        left, found = np.divmod(left, inner)
        for axis in range(outer - 1, -1, -1):
            if axis:
                left, place = np.divmod(left, box.sizes[axis])
            else:
                place = left
            found = found + (place + box.offsets[axis]) * stride
            stride *= shape[axis]
    return found


def _mixed(block: int, count: int) -> Array:
    """Return the keys of some blocks of columns, which are no row's."""
    import numpy as np

    return _mixed_of(np.arange((1 << 62) + block, (1 << 62) + block + count, dtype=np.uint64))


def _mixed_of(numbers: Array) -> Array:
    """Return an odd random number for each number, always the same (splitmix64)."""
    import numpy as np

    x = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@cache
def _keys() -> tuple[Array, Array]:
    import numpy as np

    both = _mixed_of(np.arange(2 * _COLUMNS, dtype=np.uint64) + np.uint64(1 << 63))
    return both[:_COLUMNS], both[_COLUMNS:]
