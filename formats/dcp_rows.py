"""Put together what was cut out of a `.metadata` and what was left of it, in the file's order.

Nothing here says what is wrong: metadata that is not sound in every row is declined.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ftckpt.source import safe_name

from .dcp_columns import EntryColumns
from .dcp_entry_rows import EntryRows
from .dcp_metadata import DcpMetadata, take_entries, take_paths
from .dcp_path_tables import Paths
from .dcp_records import MAX_INT, Index, StoredItem
from .dcp_tables import Entries, Items
from .lockstep import Column, Shapes
from .pickle_cut import DeclinedError, Run, Table
from .pickle_values import Values

if TYPE_CHECKING:
    from .lockstep import Ints

    # The tensor that each item is of, and the name of those of objects; then each item's hint,
    # offset, file, begin and length.
    _ItemColumns = tuple[Ints, dict[int, str], Ints, Ints, Ints, Ints, Ints]


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
        rows = EntryRows(self._values)
        self._take_entries(meta, entries, rows)
        self._take_paths(meta, paths, rows)
        size, dtype, count, offsets, sizes = rows.columns()
        place = self._places(meta, storage, rows, count, offsets)
        meta.tensors = EntryColumns(
            rows.number, size, dtype, count, (offsets, sizes, *place),
            shapes=self._values.shapes.known, dtypes=rows.dtypes, paths=list(self._files),
        )  # fmt: skip
        meta.files = set(self._files)

    def _stretches(self, said: Any, kind: type[Table]) -> Iterator[Run | dict[Any, Any]]:
        """Yield what a dict holds in order: runs, and other records as dicts.

        Raises:
            DeclinedError: a run is no key of its dict, or a key is none that torch writes: to hash
                a tuple that is nested a million deep needs a larger stack than this thread has.
        """
        own: dict[Any, Any] = {}
        for key, value in (said or {}).items():
            if type(key) is str or type(key) is Index:
                own[key] = value
                continue
            if type(key) is not Run:
                raise DeclinedError
            if value is not None or not isinstance(key.table, kind):
                raise DeclinedError
            self.runs += 1
            if own:
                yield own
                own = {}
            yield key
        if own:
            yield own

    def _take_entries(self, meta: DcpMetadata, said: Any, rows: EntryRows) -> None:
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
        if len(rows.number.keys() | meta.objects) != total:
            raise DeclinedError

    def _take_paths(self, meta: DcpMetadata, said: Any, rows: EntryRows) -> None:
        import numpy as np

        total = 0
        others: set[Any] = set()
        tables: dict[Table, None] = {}
        for part in self._stretches(said, Paths):
            if isinstance(part, Run):
                tables[part.table] = None
                continue
            take_paths(meta, part)
            others |= part.keys()
            total += len(part)
        cuts, ends = np.zeros(len(rows.names), np.int32), Shapes()
        ends.id_of(())
        for table in tables:
            assert isinstance(table, Paths)
            total += self._take_cut_paths(meta, table, rows, cuts, ends)
            # The longest columns: what comes next takes their memory.
            table.name = table.keys = Column.empty(0)
        others.update(meta.paths)
        twice = any(cuts[rows.number[name]] for name in others if name in rows.number)
        if twice or len(others) + np.count_nonzero(cuts) != total:
            raise DeclinedError
        meta.paths.join(rows.number, cuts.data, ends.known)

    def _take_cut_paths(
        self, meta: DcpMetadata, table: Paths, rows: EntryRows, cuts: Ints, ends: Shapes
    ) -> int:
        """Take the paths of a table; return how many there are."""
        import numpy as np

        cut = np.flatnonzero(table.base >= 0)
        names, count = table.name.value[cut], table.count[cut]
        keys = table.keys.value[np.repeat(table.base >= 0, table.count)]
        split = self._values.split(names, count, keys, ends)
        row = rows.of(names)
        joined = (row >= 0) & (split > 0)
        if not rows.ascii:  # the ends of their keys are others than those of the bytes
            joined[:] = False
        cuts[row[joined]] = split[joined]
        once, which = self._values.numbered(keys[np.repeat(~joined, count)])
        texts = [once[place] for place in which.tolist()]
        bounds = np.concatenate(([0], np.cumsum(count[~joined]))).tolist()
        paths = (tuple(texts[first:last]) for first, last in pairwise(bounds))
        meta.paths.update(dict(zip(self._values.texts(names[~joined]), paths, strict=True)))
        return len(cut)

    def _places(
        self, meta: DcpMetadata, said: Any, rows: EntryRows, count: Ints, offsets: Ints
    ) -> list[Ints]:
        """Return for each chunk the number of its file, its offset and its length."""
        import numpy as np

        first: Ints = np.cumsum(count) - count
        out: list[Ints] = [np.full(len(offsets), -1, np.int64) for _ in range(3)]
        tables: dict[Table, None] = {}
        total = 0
        parts = []
        for part in self._stretches(said, Items):
            if isinstance(part, Run):
                tables[part.table] = None
            else:
                parts.append(self._own_items(part, rows))
        parts += [self._cut_items(table, rows) for table in tables]
        files = list(self._files)
        for row, names, hint, offset, *place in parts:
            # Most items belong to tensors; each of the others is looked at alone.
            mine = np.flatnonzero(offset >= 0)
            for other, name in names.items():
                if meta.objects.get(name, name) is not None:
                    raise DeclinedError
                item = StoredItem()
                item.path = files[place[0][other]]
                item.offset, item.length = (int(column[other]) for column in place[1:])
                item.transforms = ()
                meta.objects[name] = item
            row, hint, offset = row[mine], np.maximum(hint[mine], 0), offset[mine]
            if (row < 0).any() or (hint >= count[row]).any():
                raise DeclinedError
            chunk = first[row] + hint
            if (offsets[chunk] != offset).any():
                raise DeclinedError
            total += len(chunk)
            for column, value in zip(out, place, strict=True):
                column[chunk] = value[mine]
        # Each chunk has one place: none is without, and none was given two.
        if (out[0] < 0).any() or total != len(offsets):
            raise DeclinedError
        return out

    def _cut_items(self, table: Table, rows: EntryRows) -> _ItemColumns:
        """Return the items of a table; -1 where there is no hint or no offset."""
        import numpy as np

        assert isinstance(table, Items)
        cut = np.flatnonzero(table.base >= 0)
        placed = table.placed[cut]
        offset = np.full(len(cut), -1, np.int64)
        offset[placed] = self._values.shape_ids(table.offset.value[cut[placed]])
        files, which = self._values.numbered(table.path.value[cut])
        number = np.array([self._file_number(path) for path in files], np.int64)[which]
        fqn = table.fqn.value[cut]
        whole = np.flatnonzero(~placed)
        names = dict(zip(whole.tolist(), self._values.texts(fqn[whole]), strict=True))
        return (
            rows.of(fqn), names, table.hint[cut], offset, number, table.begin[cut],
            table.length[cut],
        )  # fmt: skip

    def _own_items(self, own: dict[Any, Any], rows: EntryRows) -> _ItemColumns:
        """Return the same of records that were not cut out."""
        import numpy as np

        names: dict[int, str] = {}
        numbers: list[tuple[int, ...]] = []
        for place, (index, stored) in enumerate(own.items()):
            if type(index) is not Index or type(stored) is not StoredItem or stored.transforms:
                raise DeclinedError
            span = (stored.offset, stored.length)
            hint = index.hint if index.hint is not None else -1
            if type(index.fqn) is not str or type(stored.path) is not str:
                raise DeclinedError
            if any(type(n) is not int or not 0 <= n < MAX_INT for n in span):
                raise DeclinedError
            if type(hint) is not int or not -1 <= hint < MAX_INT:
                raise DeclinedError
            offset = -1
            if index.offset is None:
                names[place] = index.fqn
            else:
                offset = self._values.shapes.id_of(index.offset)
            row = rows.number.get(index.fqn, -1)
            numbers.append((row, hint, offset, self._file_number(stored.path), *span))
        row_, hints, offsets, files, begins, lengths = np.array(numbers, np.int64).T
        return row_, names, hints, offsets, files, begins, lengths

    def _file_number(self, path: str) -> int:
        if path not in self._files:
            self._files[safe_name(path, named_by=self._file)] = len(self._files)
        return self._files[path]
