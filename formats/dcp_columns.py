"""The tensors of a large `.metadata` in columns; entries and chunks are made when asked for.

A million chunks as objects are a gigabyte; as rows of numbers they are 28 megabytes.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, overload

from ftckpt.dtypes import DType

from .dcp_records import Chunk, Offsets, StoredItem, TensorEntry

if TYPE_CHECKING:
    from .lockstep import Ints


class ChunkColumns(NamedTuple):
    """One row a chunk, the chunks of a tensor side by side.

    Attributes:
        offsets: ids of shapes.
        sizes: ids of shapes.
        path: numbers of data files.
        begin: offset of the chunk's item in its file.
        length: of the item in bytes.
    """

    offsets: Sequence[int]
    sizes: Sequence[int]
    path: Sequence[int]
    begin: Sequence[int]
    length: Sequence[int]


class EntryColumns(Mapping[str, TensorEntry]):
    """Entries by stored name, in the order of the file. What it makes are copies: not to change."""

    def __init__(
        self,
        rows: dict[str, int],
        size: Ints,
        dtype: Ints,
        count: Ints,
        chunks: Sequence[Ints],
        *,
        shapes: Sequence[Offsets],
        dtypes: Sequence[DType],
        paths: Sequence[str],
    ) -> None:
        """Take the columns.

        Args:
            rows: number of each tensor by name, from 0 in order.
            size: ids of shapes.
            dtype: numbers in `dtypes`.
            count: number of chunks of each.
            chunks: the columns of `ChunkColumns`.
            shapes: sizes and offsets by id.
            dtypes: element types.
            paths: names of the data files.
        """
        import numpy as np

        self._rows = rows
        self._size, self._dtype = _compact(size), _compact(dtype)
        self._first = _compact(np.concatenate(([0], np.cumsum(count))))
        self.chunks = ChunkColumns(*(_compact(column) for column in chunks))
        self.shapes, self._dtypes, self.paths = shapes, dtypes, paths

    def __getitem__(self, name: str) -> TensorEntry:
        row = self._rows[name]
        return self._entry(
            self._size[row], self._dtype[row], self._first[row], self._first[row + 1]
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def items(self) -> ItemsView[str, TensorEntry]:
        """Return all names and entries."""
        return _Items(self)

    def rows(self) -> Iterator[tuple[str, TensorEntry]]:
        """Yield all names and entries, faster than one by one."""
        ends = iter(self._first)
        next(ends)
        columns = map(self._entry, self._size, self._dtype, self._first, ends)
        return zip(self._rows, columns, strict=True)

    def spans(self) -> Iterator[tuple[str, Offsets, DType, int, int]]:
        """Yield names, sizes and element types; the first row of the chunks of each, and the last.

        The last is the one behind them; a row is for `chunk`.
        """
        ends = iter(self._first)
        next(ends)
        sizes = map(self.shapes.__getitem__, self._size)
        dtypes = map(self._dtypes.__getitem__, self._dtype)
        return zip(self._rows, sizes, dtypes, self._first, ends, strict=False)

    def types(self) -> Iterator[tuple[str, DType]]:
        """Yield names and element types."""
        return zip(self._rows, map(self._dtypes.__getitem__, self._dtype), strict=True)

    def chunk(self, row: int) -> Chunk:
        """Return the chunk of a row of `chunks`."""
        columns, shapes = self.chunks, self.shapes
        item = StoredItem()
        item.path = self.paths[columns.path[row]]
        item.offset, item.length, item.transforms = columns.begin[row], columns.length[row], ()
        chunk = Chunk()
        chunk.offsets, chunk.sizes = shapes[columns.offsets[row]], shapes[columns.sizes[row]]
        chunk.item = item
        return chunk

    def _entry(self, size: int, dtype: int, first: int, last: int) -> TensorEntry:
        entry = TensorEntry()
        entry.size, entry.dtype = self.shapes[size], self._dtypes[dtype]
        entry.chunks = _Chunks(self, first, last)
        return entry


class _Items(ItemsView[str, TensorEntry]):
    _mapping: EntryColumns

    def __iter__(self) -> Iterator[tuple[str, TensorEntry]]:
        return self._mapping.rows()


class _Chunks(Sequence[Chunk]):
    """The chunks of one tensor."""

    __slots__ = ("_first", "_last", "_of")

    def __init__(self, of: EntryColumns, first: int, last: int) -> None:
        self._of, self._first, self._last = of, first, last

    def __len__(self) -> int:
        return self._last - self._first

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        rows = range(self._first, self._last)
        if isinstance(index, slice):
            return [self._of.chunk(row) for row in rows[index]]
        return self._of.chunk(rows[index])


def _compact(column: Ints) -> memoryview:
    """Return a column in the fewest bytes, as something that gives plain ints."""
    import numpy as np

    small = not len(column) or int(column.max()) < 1 << 31
    return column.astype(np.int32 if small else np.int64).data
