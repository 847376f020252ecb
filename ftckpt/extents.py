"""The smallest nouns: which elements of a tensor, which bytes of a file, how large a block is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

# Returns `length` bytes at `offset` of something; the arguments are offset and length.
Read = Callable[[int, int], bytes]
# The unit in which files are digested, uploaded and taken up again after a kill.
BLOCK = 64 << 20


class Box(NamedTuple):
    """A hyper-rectangle: `offsets[d] <= index[d] < offsets[d] + sizes[d]`, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements; 1 for a 0-d box."""
        return prod(self.sizes)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that covers all of `shape`."""
        return _whole(tuple(shape))


# Thousands of tensors have few shapes, and a transfer describes each tensor several times.
@lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


class Extent(NamedTuple):
    """`length` bytes at `offset` of `file` (a path relative to the checkpoint, POSIX)."""

    file: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first byte after the extent."""
        return self.offset + self.length
