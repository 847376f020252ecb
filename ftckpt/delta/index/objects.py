"""The non-tensor state of a delta: one file of records, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ftckpt.digests.blocks import block_count
from ftckpt.transfer.layout import OutputFile
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.transfer.write.blocks import BlockMaker


class RecordEntry(NamedTuple):
    """One object.

    Attributes:
        name: as `ftckpt.checkpoint.ObjectInfo` has it.
        form: what the bytes are, in words of the format that reads deltas.
        rank: whose it is, where known.
        offset, length: of its bytes in the file of records.
    """

    name: str
    form: str
    rank: int | None
    offset: int
    length: int


@dataclass(frozen=True)
class RecordFile:
    """All that a delta holds beside tensors.

    Attributes:
        files: the file that holds them; none where there are none.
        entries: in the order in which they lie in it.
        bytes_in: of the source, each byte once: the objects, or all that its files hold beside
            tensors where that is kept too.
    """

    files: Sequence[OutputFile] = ()
    entries: Sequence[RecordEntry] = ()
    bytes_in: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return sum(file.size for file in self.files)


def record_digests(records: RecordFile, gatherer: Gatherer) -> list[bytes]:
    """Return the XXH3-128 of each object, in order, from the source and not from what was written.

    Args:
        records: the objects.
        gatherer: reads the source.
    """
    hasher = _Hasher(records.entries)
    for file in records.files:
        maker = BlockMaker(file, gatherer)
        for number in range(block_count(file.size)):
            maker.make(number, hasher)
    return hasher.digests


class _Hasher:
    """Hashes records while the bytes of their file go by, in order.

    Args:
        entries: in the order in which they lie.
    """

    def __init__(self, entries: Sequence[RecordEntry]) -> None:
        import xxhash

        self._entries = entries
        self._states = [xxhash.xxh3_128() for _ in entries]
        self._first = 0

    def write(self, offset: int, view: memoryview) -> None:
        """Take the bytes at `offset`."""
        stop = offset + len(view)
        while self._first < len(self._entries):
            entry = self._entries[self._first]
            end = entry.offset + entry.length
            begin = max(entry.offset, offset)
            if begin < min(end, stop):
                part = view[begin - offset : min(end, stop) - offset]
                self._states[self._first].update(part)
            if end > stop:
                return
            self._first += 1

    @property
    def digests(self) -> list[bytes]:
        """The digest of each record so far."""
        return [state.digest() for state in self._states]
