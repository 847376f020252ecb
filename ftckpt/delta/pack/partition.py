"""Divide blocks over data files before encoding, the same way on every machine.

The tensors of one parameter lie together, block by block, those that predict others first: who
encodes or reads them in this order has what the next one needs still at hand. A data file is made
from its beginning to its end by one thread, so there are many more files than threads.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ftckpt.checkpoint import Kind

from .pair import DeltaPair

LEAST, MOST = 16 << 20, 1 << 30  # bytes of elements that go into one data file
_FILES = 64  # as many files as that, where the elements suffice
_ORDER = {Kind.EXP_AVG: 0, Kind.EXP_AVG_SQ: 1, Kind.MASTER: 2}


@dataclass
class PackedFile:
    """The blocks of one data file, in the order in which they lie in it.

    Attributes:
        number: of the file.
        nbytes: of the elements; the file has at most as many.
    """

    number: int
    nbytes: int = 0
    _tensors: array[int] = field(default_factory=lambda: array("I"), repr=False)
    _blocks: array[int] = field(default_factory=lambda: array("I"), repr=False)

    @property
    def path(self) -> str:
        """The file's name."""
        return f"{self.number:05d}.blocks"

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def blocks(self) -> Iterator[tuple[int, int]]:
        """Each block: its tensor's place in the list of pairs, and its number."""
        return zip(self._tensors, self._blocks, strict=True)

    def add(self, tensor: int, block: int, nbytes: int) -> None:
        """Put one more block at the end."""
        self._tensors.append(tensor)
        self._blocks.append(block)
        self.nbytes += nbytes


def divide(pairs: Sequence[DeltaPair]) -> list[PackedFile]:
    """Deal out all blocks of the tensors of `pairs` to data files."""
    total = sum(pair.info.nbytes for pair in pairs)
    most = min(MOST, max(LEAST, total // _FILES))
    parts: list[PackedFile] = []
    for tensor, block, nbytes in _in_order(pairs):
        if not parts or parts[-1].nbytes + nbytes > most:
            parts.append(PackedFile(len(parts)))
        parts[-1].add(tensor, block, nbytes)
    return parts


def _in_order(pairs: Sequence[DeltaPair]) -> Iterator[tuple[int, int, int]]:
    """Yield tensor, block and bytes of every block."""
    families: dict[tuple[str, str], list[int]] = {}
    for number, pair in enumerate(pairs):
        families.setdefault(pair.kin, []).append(number)
    for members in families.values():
        members.sort(key=lambda number: _ORDER.get(pairs[number].info.kind, len(_ORDER)))
        counts = [pairs[number].blocks for number in members]
        for block in range(max(counts)):
            for number, count in zip(members, counts, strict=True):
                if block < count:
                    yield number, block, pairs[number].block_nbytes(block)
