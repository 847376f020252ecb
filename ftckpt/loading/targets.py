"""Memory that tensors are loaded into.

Bytes of files that are read at once, and what is taken of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ftckpt.checkpoint.dtypes import DType
from ftckpt.checkpoint.read_tensor import raw_dtype
from ftckpt.transfer.casting import cast

if TYPE_CHECKING:
    from ftckpt.transfer.content import Shard
    from ftckpt.transfer.read.copies_plan import ElementMove, StoredBox


class LoadTarget(Protocol):
    """The memory of one shard: elements in C order."""

    @property
    def dtype(self) -> DType:
        """The type of its elements."""

    def memory(self, start: int, count: int) -> memoryview | None:
        """Return the bytes of some elements, to be read into; None where they cannot be."""

    def buffer(self, nbytes: int) -> memoryview:
        """Return this thread's memory for bytes that are read to be put in place."""

    def put(self, raw: memoryview, offset: int, moves: Sequence[ElementMove]) -> None:
        """Put elements in place.

        Args:
            raw: bytes of a file, in memory that `buffer` gave.
            offset: of the first of them in the file.
            moves: which of them are whose.
        """

    def clear(self) -> None:
        """Make all elements zero."""

    def whole(self, data: memoryview) -> None:
        """Put all elements in place, of a type that is smaller than a byte."""

    def finish(self) -> None:
        """Wait until all that was put is in place; called once, when nothing more comes."""


class Wanted(NamedTuple):
    """A shard that is loaded.

    Attributes:
        name: what the job calls the tensor.
        shard: what fills it.
        target: where it goes.
    """

    name: str
    shard: Shard
    target: LoadTarget


class ArrayTarget:
    """Memory of this process, dense, of the shard's own type or another one.

    Args:
        memory: the elements, writable.
        dtype: of them.
    """

    def __init__(self, memory: memoryview, dtype: DType) -> None:
        self._memory = memory
        self.dtype = dtype

    def memory(self, start: int, count: int) -> memoryview | None:
        """Return the bytes of some elements."""
        size = self.dtype.itemsize
        return self._memory[start * size : (start + count) * size]

    def buffer(self, nbytes: int) -> memoryview:
        """Return this thread's buffer."""
        from ftckpt.workers.buffers import buffer

        return buffer(nbytes, _SLOT)

    def put(self, raw: memoryview, offset: int, moves: Sequence[ElementMove]) -> None:
        """Copy elements with their strides, and cast them where the types differ."""
        import numpy as np

        size = self.dtype.itemsize
        for move in moves:
            found = raw_dtype(move.dtype.itemsize)
            items: Any = np.ndarray(move.sizes, found, raw, move.offset - offset, move.strides)
            if move.dtype != self.dtype:
                items = cast(np.ascontiguousarray(items), move.dtype, self.dtype)
            steps = tuple(step * size for step in move.steps)
            place: Any = np.ndarray(
                move.sizes, raw_dtype(size), self._memory, move.start * size, steps
            )
            place[...] = items

    def clear(self) -> None:
        """Make all bytes zero."""
        import numpy as np

        np.frombuffer(self._memory, np.uint8)[:] = 0

    def whole(self, data: memoryview) -> None:
        """Copy all bytes."""
        self._memory[:] = data

    def finish(self) -> None:
        """Return: nothing is on its way."""


_SLOT = 3  # of `workers.buffers`: apart from those of the gatherer


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
