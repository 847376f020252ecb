"""Bytes of files that are read at once, and what is taken of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from ftckpt.transfer.read.copies_plan import ElementMove
    from ftckpt.transfer.read.geometry import StoredBox

    from .targets import Wanted


class Take(NamedTuple):
    """Elements of a reading, and the shard that they go to, by its number."""

    number: int
    move: ElementMove


class FileRead(NamedTuple):
    """Bytes that are read at once.

    Attributes:
        held: the file, or the stream to undo first.
        offset: of the first byte.
        nbytes: how many.
        takes: what is taken of them.
    """

    held: StoredBox
    offset: int
    nbytes: int
    takes: Sequence[Take]

    @property
    def end(self) -> int:
        """Where they end."""
        return self.offset + self.nbytes


class BlockRead(NamedTuple):
    """A block of the manifest that is read from its begin to its end.

    Attributes:
        file: of the checkpoint.
        number: of the block.
        length: bytes of it.
        digest: as recorded.
        readings: that begin in it, in order.
    """

    file: str
    number: int
    length: int
    digest: bytes
    readings: Sequence[FileRead]


class CarriesOut(Protocol):
    """Makes readings (`ftckpt.loading.fill.Filler`)."""

    def carry_out(self, reading: FileRead, wanted: Sequence[Wanted]) -> memoryview:
        """Read some bytes and put them in place; return them as they lie in memory now."""

    def skip(self, file: str, offset: int, out: memoryview) -> None:
        """Read bytes that nobody wants, for the check alone."""
