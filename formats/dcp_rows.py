"""Put together what was cut out of a `.metadata` and what was left of it, in the file's order.

Nothing here says what is wrong: metadata that is not sound in every row is declined.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress, pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from ftckpt.dtypes import DType
from ftckpt.source import safe_name

from .dcp_columns import EntryColumns
from .dcp_metadata import DcpMetadata, take_entries, take_paths
from .dcp_records import MAX_INT, Index, StoredItem, TensorEntry
from .dcp_tables import Entries, Items, Paths
from .lockstep import Column
from .pickle_cut import DeclinedError, Run, Table
from .pickle_values import Values

if TYPE_CHECKING:
    from .lockstep import Ints

    # Names and which of them each item has; then its hint, offset, file, begin and length.
    _ItemColumns = tuple[tuple[list[str], Ints], Ints, Ints, Ints, Ints, Ints]


class Joined:
    """The three dicts of a metadata, each with keys for what was cut out of it.

    Attributes:
        runs: how many of these keys were met.
    """

    def __init__(self, values: Values, file: str) -> None:
        self.runs = 0
        self._values = values
        self._file = file
        self._files: dict[str, int] = {}

    def take(self, meta: DcpMetadata, entries: Any, paths: Any, storage: Any) -> None:
        """Fill `meta` from the three dicts.

        Raises:
            DeclinedError: a row contradicts another, or there are two of one name.
            TypeError, AttributeError, FtckptError: a record of the rest is not sound.
        """
        self._take_paths(meta, paths)
        rows = _Rows(self._values)
        self._take_entries(meta, entries, rows)
        size, dtype, count, offsets, sizes = rows.columns()
        number = {name: row for row, name in enumerate(rows.names)}
        place = self._places(meta, storage, number, count, offsets)
        meta.tensors = EntryColumns(
            number, size, dtype, count, (offsets, sizes, *place),
            shapes=self._values.shapes.known, dtypes=rows.dtypes, paths=list(self._files),
        )  # fmt: skip
        meta.files = set(self._files)

    def _stretches(self, said: Any, kind: type[Table]) -> Iterator[Run | dict[Any, Any]]:
        """Yield what a dict holds in order: runs, and other records as dicts."""
        own: dict[Any, Any] = {}
        for key, value in (said or {}).items():
            if type(key) is not Run:
                own[key] = value
                continue
            if value is not None or not isinstance(key.table, kind):
                raise DeclinedError
            self.runs += 1
            if own:
                yield own
                own = {}
            yield key
        if own:
            yield own

    def _take_entries(self, meta: DcpMetadata, said: Any, rows: _Rows) -> None:
        total = 0
        for part in self._stretches(said, Entries):
            if isinstance(part, Run):
                total += part.last - part.first
                for name in rows.add(part):
                    meta.objects[name] = None
            else:
                total += len(part)
                read = DcpMetadata()
                take_entries(read, part, self._file)
                meta.objects.update(read.objects)
                for name, entry in read.tensors.items():
                    rows.add_entry(name, entry)
        if len(set(rows.names).union(meta.objects)) != total:
            raise DeclinedError

    def _take_paths(self, meta: DcpMetadata, said: Any) -> None:
        total = 0
        others: set[Any] = set()
        tables: dict[Table, None] = {}
        for part in self._stretches(said, Paths):
            if isinstance(part, Run):
                tables[part.table] = None
                continue
            take_paths(meta, part)
            others |= part.keys() - meta.paths.keys()
            total += len(part)
        for table in tables:
            assert isinstance(table, Paths)
            keys = self._values.texts(table.keys.value)
            bounds = table.first.tolist()
            paths = [tuple(keys[first:last]) for first, last in pairwise(bounds)]
            cut = (table.base >= 0).tolist()
            names = self._values.texts(table.name.value)
            meta.paths.update(compress(zip(names, paths, strict=True), cut))
            total += sum(cut)
            # The longest columns: what comes next takes their memory.
            table.name = table.keys = Column.empty(0)
        if len(others.union(meta.paths)) != total:
            raise DeclinedError

    def _places(
        self, meta: DcpMetadata, said: Any, number: dict[str, int], count: Ints, offsets: Ints
    ) -> list[Ints]:
        """Return for each chunk the number of its file, its offset and its length."""
        import numpy as np

        first: Ints = np.cumsum(count) - count
        out: list[Ints] = [np.full(len(offsets), -1, np.int64) for _ in range(3)]
        tables: dict[Table, None] = {}
        parts = []
        for part in self._stretches(said, Items):
            if isinstance(part, Run):
                tables[part.table] = None
            else:
                parts.append(self._own_items(part))
        parts += map(self._cut_items, tables)
        for (names, which), hint, offset, *place in parts:
            # Most items belong to tensors; each of the others is looked at alone.
            row = np.array([number.get(name, -1) for name in names], np.int64)[which]
            mine = np.flatnonzero(offset >= 0)
            for other in np.flatnonzero(offset < 0).tolist():
                name = names[which[other]]
                if meta.objects.get(name, name) is not None:
                    raise DeclinedError
                item = StoredItem()
                item.path = list(self._files)[place[0][other]]
                item.offset, item.length = (int(column[other]) for column in place[1:])
                item.transforms = ()
                meta.objects[name] = item
            row, hint, offset = row[mine], np.maximum(hint[mine], 0), offset[mine]
            if (row < 0).any() or (hint >= count[row]).any():
                raise DeclinedError
            chunk = first[row] + hint
            twice = len(np.unique(chunk)) < len(chunk) or (out[0][chunk] >= 0).any()
            if twice or (offsets[chunk] != offset).any():
                raise DeclinedError
            for column, value in zip(out, place, strict=True):
                column[chunk] = value[mine]
        if (out[0] < 0).any():
            raise DeclinedError
        return out

    def _cut_items(self, table: Table) -> _ItemColumns:
        """Return the items of a table; -1 where there is no hint or no offset."""
        import numpy as np

        assert isinstance(table, Items)
        cut = table.base >= 0
        rows = np.flatnonzero(cut)
        offset = np.full(len(rows), -1, np.int64)
        placed = table.placed[rows]
        offset[placed] = self._values.shape_ids(table.offset.value[cut & table.placed])
        files, which = self._values.numbered(table.path.value[rows])
        number = np.array([self._file_number(path) for path in files], np.int64)[which]
        names = self._values.numbered(table.fqn.value[rows])
        return names, table.hint[rows], offset, number, table.begin[rows], table.length[rows]

    def _own_items(self, own: dict[Any, Any]) -> _ItemColumns:
        """Return the same of records that were not cut out."""
        import numpy as np

        names: list[str] = []
        numbers: list[tuple[int, ...]] = []
        for index, stored in own.items():
            if type(index) is not Index or type(stored) is not StoredItem or stored.transforms:
                raise DeclinedError
            place = (stored.offset, stored.length)
            hint = index.hint if index.hint is not None else -1
            if type(index.fqn) is not str or type(stored.path) is not str:
                raise DeclinedError
            if any(type(n) is not int or not 0 <= n < MAX_INT for n in place):
                raise DeclinedError
            if type(hint) is not int or not -1 <= hint < MAX_INT:
                raise DeclinedError
            offset = -1 if index.offset is None else self._values.shapes.id_of(index.offset)
            names.append(index.fqn)
            numbers.append((hint, offset, self._file_number(stored.path), *place))
        hints, offsets, files, begins, lengths = np.array(numbers, np.int64).T
        return (names, np.arange(len(names))), hints, offsets, files, begins, lengths

    def _file_number(self, path: str) -> int:
        if path not in self._files:
            self._files[safe_name(path, named_by=self._file)] = len(self._files)
        return self._files[path]


class _Rows:
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
        self._read: dict[Entries, tuple[list[str], Ints, Ints, Ints, Ints, Ints]] = {}
        self._parts: list[list[Ints]] = [[np.empty(0, np.int64)] for _ in range(5)]

    def add(self, run: Run) -> list[str]:
        """Add the tensors of a run; return the names of its objects."""
        table = run.table
        assert isinstance(table, Entries)
        if table not in self._read:
            self._read[table] = self._resolve(table)
        names, *columns = self._read[table]
        rows = slice(run.first, run.last)
        tensor = table.tensor[rows]
        chunks = slice(int(table.first[run.first]), int(table.first[run.last]))
        for parts, column in zip(self._parts[:3], columns, strict=False):
            parts.append(column[rows][tensor])
        for parts, column in zip(self._parts[3:], columns[3:], strict=True):
            parts.append(column[chunks])
        if tensor.all():
            self.names += names[rows]
            return []
        pairs = list(zip(names[rows], tensor.tolist(), strict=True))
        self.names += [name for name, is_tensor in pairs if is_tensor]
        return [name for name, is_tensor in pairs if not is_tensor]

    def _resolve(self, table: Entries) -> tuple[list[str], Ints, Ints, Ints, Ints, Ints]:
        """Return names, sizes, element types, numbers of chunks; the chunks' offsets and sizes."""
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
        return (
            values.texts(table.name.value), size, dtype, table.count,
            values.shape_ids(table.offsets.value), values.shape_ids(table.sizes.value),
        )  # fmt: skip

    def add_entry(self, name: str, entry: TensorEntry) -> None:
        """Add one tensor that was not cut out."""
        import numpy as np

        id_of = self._values.shapes.id_of
        self.names.append(name)
        columns = (
            [id_of(entry.size)], [self._dtype(entry.dtype)], [len(entry.chunks)],
            [id_of(chunk.offsets) for chunk in entry.chunks],
            [id_of(chunk.sizes) for chunk in entry.chunks],
        )  # fmt: skip
        for parts, column in zip(self._parts, columns, strict=True):
            parts.append(np.array(column, np.int64))

    def columns(self) -> list[Ints]:
        """Return sizes, element types, numbers of chunks; and the chunks' offsets and sizes."""
        import numpy as np

        return [np.concatenate(parts) for parts in self._parts]

    def _dtype(self, dtype: Any) -> int:
        if not isinstance(dtype, DType):
            raise DeclinedError
        if dtype not in self.dtypes:
            self.dtypes.append(dtype)
        return self.dtypes.index(dtype)
