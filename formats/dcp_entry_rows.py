"""The tensors of a large `.metadata` as rows, put together from tables and single entries."""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ftckpt.dtypes import DType

from .dcp_records import MAX_INT, TensorEntry
from .dcp_tables import Entries
from .pickle_cut import DeclinedError, Run
from .pickle_values import Values

if TYPE_CHECKING:
    from .lockstep import Ints

# What no value is: the name of a tensor that was not cut out.
_WRITTEN = -(1 << 62)


class EntryRows:
    """Tensors and their chunks, as columns that grow.

    Attributes:
        names: of the tensors.
        dtypes: element types that occur.
    """

    def __init__(self, values: Values) -> None:
        import numpy as np

        self.names: list[str] = []
        self.dtypes: list[DType] = []
        self._values = values
        self._read: dict[Entries, tuple[list[str], list[Ints]]] = {}
        self._chunks: set[int] = set()
        self._parts: list[list[Ints]] = [[np.empty(0, np.int64)] for _ in range(6)]

    @cached_property
    def number(self) -> dict[str, int]:
        """Number of each tensor by name, from 0 in order; asked when all are there."""
        return dict(zip(self.names, range(len(self.names)), strict=True))

    @cached_property
    def ascii(self) -> bool:
        """Whether the names are, all of them."""
        return all(map(str.isascii, self.names))

    @cached_property
    def _by_place(self) -> tuple[Ints, Ints]:
        """Values that are names, ascending, and their rows; one that no name is at least."""
        import numpy as np

        places: Ints = np.concatenate(([_WRITTEN], *self._parts[0]))
        if (places[1:] >= places[:-1]).all():  # as in most files: in their order
            return places, np.arange(-1, len(places) - 1)
        order = np.argsort(places)
        return places[order], order - 1

    def of(self, names: Ints) -> Ints:
        """Return the numbers of tensors by values that are their names; -1 of what is none."""
        import numpy as np

        mine, rows = self._by_place
        place = np.minimum(np.searchsorted(mine, names), len(mine) - 1)
        row: Ints = np.where(mine[place] == names, rows[place], -1)
        others = np.flatnonzero(row < 0)  # a name may be written out more than once
        row[others] = [self.number.get(name, -1) for name in self._values.texts(names[others])]
        return row

    def add(self, run: Run) -> list[str]:
        """Add the tensors of a run; return the names of its objects."""
        table = run.table
        assert isinstance(table, Entries)
        if table not in self._read:
            self._read[table] = self._resolve(table)
        names, columns = self._read[table]
        rows = slice(run.first, run.last)
        tensor = table.tensor[rows]
        chunks = slice(int(table.first[run.first]), int(table.first[run.last]))
        for parts, column in zip(self._parts[:4], columns, strict=False):
            parts.append(column[rows][tensor])
        for parts, column in zip(self._parts[4:], columns[4:], strict=True):
            parts.append(column[chunks])
        if tensor.all():
            self.names += names[rows]
            return []
        pairs = list(zip(names[rows], tensor.tolist(), strict=True))
        self.names += [name for name, is_tensor in pairs if is_tensor]
        return [name for name, is_tensor in pairs if not is_tensor]

    def _resolve(self, table: Entries) -> tuple[list[str], list[Ints]]:
        """Return names; and their values, sizes, element types, numbers of chunks.

        Then the chunks' offsets and sizes.
        """
        import numpy as np

        values = self._values
        tensor = (table.base >= 0) & table.tensor
        size = np.full(len(tensor), -1, np.int64)
        size[tensor] = values.shape_ids(table.size.value[tensor])
        if any(prod(values.shapes.known[i]) >= MAX_INT for i in np.unique(size[tensor]).tolist()):
            raise DeclinedError
        dtypes, which = np.unique(table.dtype[tensor], return_inverse=True)
        ids = np.array([self._dtype(values.object(i)) for i in dtypes.tolist()], np.int64)
        dtype = np.full(len(size), -1, np.int64)
        dtype[tensor] = ids[which]
        offsets, sizes = values.shape_ids(table.offsets.value), values.shape_ids(table.sizes.value)
        name = table.name.value
        return values.texts(name), [name, size, dtype, table.count, offsets, sizes]

    def add_entry(self, name: str, entry: TensorEntry) -> None:
        """Add one tensor that was not cut out.

        Raises:
            DeclinedError: a chunk of it was there before: it cannot have two places.
        """
        import numpy as np

        before = len(self._chunks)
        self._chunks.update(map(id, entry.chunks))
        if len(self._chunks) < before + len(entry.chunks):
            raise DeclinedError
        id_of = self._values.shapes.id_of
        self.names.append(name)
        columns = (
            [_WRITTEN], [id_of(entry.size)], [self._dtype(entry.dtype)], [len(entry.chunks)],
            [id_of(chunk.offsets) for chunk in entry.chunks],
            [id_of(chunk.sizes) for chunk in entry.chunks],
        )  # fmt: skip
        for parts, column in zip(self._parts, columns, strict=True):
            parts.append(np.array(column, np.int64))

    def columns(self) -> list[Ints]:
        """Return sizes, element types, numbers of chunks; and the chunks' offsets and sizes."""
        import numpy as np

        return [np.concatenate(parts) for parts in self._parts[1:]]

    def _dtype(self, dtype: Any) -> int:
        if not isinstance(dtype, DType):
            raise DeclinedError
        if dtype not in self.dtypes:
            self.dtypes.append(dtype)
        return self.dtypes.index(dtype)
