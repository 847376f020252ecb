"""Divide the bytes of a checkpoint among parts, the same way on every machine.

The files stand in a row, in the order of their names, and the row is cut into pieces of equal
length; so do the tensors, where the work is by tensors. A task belongs to the part in whose piece
its middle lies. A part has therefore at most one task more than its share, reads neighbouring
bytes, and knows its tasks without a list of the others'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple, Protocol

from ftckpt.checkpoint import TensorInfo
from ftckpt.storage.source import Source


class ByteRow(NamedTuple):
    """Things of some sizes, in a row.

    Attributes:
        starts: where each begins.
        total: length of the row.
    """

    starts: Mapping[str, int]
    total: int

    @classmethod
    def of(cls, sizes: Iterable[tuple[str, int]]) -> ByteRow:
        """Put things in a row, by name."""
        starts, at = {}, 0
        for name, size in sorted(sizes):
            starts[name] = at
            at += size
        return cls(starts, at)

    def part(self, name: str, offset: int, length: int, parts: int) -> int:
        """Return the part that a range of a thing belongs to."""
        start = self.starts.get(name)
        if start is None or not self.total:
            # It is in no listing (a file of a base, a file that is lost): any part will do.
            import xxhash

            text = f"{name}\0{offset}".encode("utf-8", "surrogateescape")
            drawn: int = xxhash.xxh3_64_intdigest(text)
            return drawn % parts
        middle = start + offset + length // 2
        return min(max(middle, 0) * parts // self.total, parts - 1)


class Divisible(Protocol):
    """What can be divided: an opened checkpoint, or files alone."""

    @property
    def source(self) -> Source:
        """The files."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by key."""


class FilesAlone(NamedTuple):
    """Files that need not open as a checkpoint."""

    source: Source
    tensors: Mapping[str, TensorInfo]


NOTHING: Mapping[str, int] = {}
# What follows from a task of a part, which no other knows of: the part that meets it does it.
WHO_MEETS_IT = -1


class Shares:
    """What each part of a checkpoint is.

    Args:
        checkpoint: opened, or its files alone.
        names: of the files that are read.
        parts: how many there are.
        result: sizes of the tensors that are made of it, by key.
    """

    def __init__(
        self,
        checkpoint: Divisible,
        names: Iterable[str],
        parts: int,
        result: Mapping[str, int] = NOTHING,
    ) -> None:
        self.parts = parts
        self._result = ByteRow.of(result.items())
        entries = checkpoint.source.entries
        self._files = ByteRow.of((name, entries[name].size) for name in names if name in entries)
        self._all = checkpoint.tensors

    def of_bytes(self, file: str, offset: int, length: int) -> int:
        """Return the part that a range of a file belongs to."""
        return self._files.part(file, offset, length, self.parts)

    def of_tensor(self, key: str) -> int:
        """Return the part that a tensor belongs to; one of a checkpoint beside it too."""
        info = self._all.get(key)
        return self.of_elements(key, 0, 0 if info is None else info.nbytes)

    def of_elements(self, key: str, offset: int, length: int) -> int:
        """Return the part that bytes of a tensor's elements belong to."""
        return self._tensors.part(key, offset, length, self.parts)

    @cached_property
    def _tensors(self) -> ByteRow:
        """The row of the tensors: few checks ask for it, and it takes longest to make."""
        return ByteRow.of((key, info.nbytes) for key, info in self._all.items())

    def of_result(self, key: str, offset: int) -> int:
        """Return the part that bytes of a tensor of the result belong to."""
        return self._result.part(key, offset, 0, self.parts)
