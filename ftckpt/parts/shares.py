"""Divide the bytes of a checkpoint among parts, the same way on every machine.

The files stand in a row, in the order of their names, and the row is cut into pieces of equal
length; so do the tensors, where the work is by tensors. A task belongs to the part in whose piece
its middle lies. A part has therefore at most one task more than its share, reads neighbouring
bytes, and knows its tasks without a list of the others'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint


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


class Shares:
    """What each part of a checkpoint is.

    Args:
        checkpoint: opened.
        names: of the files that are read.
        parts: how many there are.
    """

    def __init__(self, checkpoint: Checkpoint, names: Iterable[str], parts: int) -> None:
        self.parts = parts
        entries = checkpoint.source.entries
        self._files = ByteRow.of((name, entries[name].size) for name in names if name in entries)
        self._lengths = {key: info.nbytes for key, info in checkpoint.tensors.items()}
        self._tensors = ByteRow.of(self._lengths.items())

    def of_bytes(self, file: str, offset: int, length: int) -> int:
        """Return the part that a range of a file belongs to."""
        return self._files.part(file, offset, length, self.parts)

    def of_tensor(self, key: str) -> int:
        """Return the part that a tensor belongs to; one of a checkpoint beside it too."""
        return self._tensors.part(key, 0, self._lengths.get(key, 0), self.parts)
