"""The values in runs of records: written out there, in another run, or in the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .dcp_records import is_shape
from .lockstep import TEXT_BITS, Column, Shapes
from .pickle_cut import DeclinedError, Table
from .pickle_words import Words

if TYPE_CHECKING:
    from .lockstep import Ints, Mask

_LENGTH = (1 << TEXT_BITS) - 1
# A key that is longer is not looked for in its name.
_LONG = 256


class Values:
    """Texts and shapes of the runs that a walk has cut out.

    Attributes:
        foreign: memo indices of what the runs take from the rest, ascending.
        written: opcodes that write out what the rest takes from runs, by memo index.
        shapes: every size and offset.
    """

    def __init__(
        self,
        data: bytearray,
        shapes: Shapes,
        tables: Iterable[Table],
        wanted: Iterable[int],
        size: bytes,
    ) -> None:
        """Learn what each memo index stands for.

        Args:
            data: the pickle.
            shapes: what the tables' ids stand for.
            tables: what was cut out.
            wanted: memo indices that the rest takes from the tables.
            size: opcodes that push `torch.Size` in the rest.

        Raises:
            DeclinedError: a record takes what is not memoised yet, or the rest what is neither
                text nor shape.
        """
        import numpy as np

        self.shapes = shapes
        self._data = data
        self._words = Words(data, len(data))
        self._given: dict[int, Any] = {}
        texts: list[tuple[Column, Ints]] = []
        sizes: list[tuple[Column, Ints]] = []
        taken: list[Ints] = [np.empty(0, np.int64)]
        for table in tables:
            cut = table.base >= 0
            if (table.reach[cut] >= table.base[cut]).any():
                raise DeclinedError
            texts += table.texts()
            sizes += table.shapes()
            index, base = table.objects()
            taken.append(index[base >= 0])
        wanted = list(wanted)
        known_texts, known_shapes = _known(texts, wanted), _known(sizes, wanted)
        self.written = {
            index: self._opcodes(_find(known_texts, index), _find(known_shapes, index), size)
            for index in wanted
        }
        for columns, known in ((texts, known_texts), (sizes, known_shapes)):
            for column, base in columns:
                _resolve(column, base >= 0, known)
                taken.append(-2 - column.value[column.value < -1])
        self.foreign = np.unique(np.concatenate(taken))

    def give(self, objects: Sequence[Any]) -> None:
        """Say what the memo has at each of `foreign`."""
        self._given = dict(zip(self.foreign.tolist(), objects, strict=True))

    def texts(self, places: Ints) -> list[str]:
        """Return the texts that values are.

        Raises:
            DeclinedError: one of them is none.
        """
        data = self._data
        begin = places >> TEXT_BITS
        spans = list(zip(begin.tolist(), (begin + (places & _LENGTH)).tolist(), strict=True))
        try:
            texts = [data[first:last].decode() for first, last in spans]
        except UnicodeDecodeError:
            texts = [data[first:last].decode("utf-8", "surrogatepass") for first, last in spans]
        for place in (places < 0).nonzero()[0].tolist():
            texts[place] = self.object(-2 - int(places[place]))
            if type(texts[place]) is not str:
                raise DeclinedError
        return texts

    def split(self, names: Ints, count: Ints, keys: Ints, known: Shapes) -> Ints:
        """Return where keys end in names that are these keys joined by dots: ids in `known`.

        Args:
            names: values that are texts.
            count: how many keys each has.
            keys: values that are texts, those of each name side by side.
            known: takes the places, in bytes; those of a name that is no such thing are none.
        """
        import numpy as np

        length = np.where(keys < 0, 0, keys & _LENGTH)
        row = np.repeat(np.arange(len(names)), count)
        behind = np.cumsum(count)
        passed = np.concatenate((np.zeros(1, np.int64), np.cumsum(length + 1)))
        end = passed[1:] - 1 - passed[behind - count][row]
        joined = (names >= 0) & (count > 0)
        joined &= passed[behind] - passed[behind - count] - 1 == names & _LENGTH
        joined[row[keys < 0]] = False
        begin = (names >> TEXT_BITS)[row] + end - length
        later = np.flatnonzero(joined[row] & (end > length))
        joined[row[later[self._words.bytes_at(begin[later] - 1) != ord(".")]]] = False
        masks = np.array([(1 << 8 * n) - 1 for n in range(8)] + [-1], np.int64)
        rest = np.flatnonzero(joined[row])
        for at in range(0, _LONG, 8):
            left = length[rest] - at
            rest, left = rest[left > 0], left[left > 0]
            mine = self._words.at((keys[rest] >> TEXT_BITS) + at)
            other = self._words.at(begin[rest] + at) ^ mine
            joined[row[rest[other & masks[np.minimum(left, 8)] != 0]]] = False
        joined[row[rest[length[rest] > _LONG]]] = False
        ends = [np.zeros(len(names), np.int64) for _ in range(int(count.max(initial=0)))]
        for place, column in enumerate(ends):
            has = np.flatnonzero(joined & (count > place))
            column[has] = end[(behind - count)[has] + place]
        return known.ids_of(np.where(joined, count, 0), ends)

    def numbered(self, places: Ints) -> tuple[list[str], Ints]:
        """Return the texts of values that repeat them, and their numbers in that list.

        Raises:
            DeclinedError: one of them is none.
        """
        import numpy as np

        once, which = np.unique(places, return_inverse=True)
        return self.texts(once), which

    def shape_ids(self, ids: Ints) -> Ints:
        """Return the ids of the shapes that values are.

        Raises:
            DeclinedError: one of them is none.
        """
        import numpy as np

        ids = ids.copy()
        rows = np.flatnonzero(ids < -1)
        foreign, which = np.unique(ids[rows], return_inverse=True)
        shapes = [self.object(-2 - index) for index in foreign.tolist()]
        if not all(map(is_shape, shapes)):
            raise DeclinedError
        ids[rows] = np.array([self.shapes.id_of(shape) for shape in shapes], np.int64)[which]
        if (ids < 0).any():
            raise DeclinedError
        return ids

    def object(self, index: int) -> Any:
        """Return what the rest has at one of `foreign`."""
        return self._given[index]

    def _opcodes(self, text: int | None, shape: int | None, size: bytes) -> bytes:
        if text is not None:
            raw = self._raw(text)
            return b"X" + len(raw).to_bytes(4, "little") + raw
        if shape is None or not size:
            raise DeclinedError
        numbers = (b"\x8a\x08" + n.to_bytes(8, "little") for n in self.shapes.known[shape])
        return size + b"(" + b"".join(numbers) + b"t\x85R"

    def _raw(self, place: int) -> bytearray:
        begin = place >> TEXT_BITS
        return self._data[begin : begin + (place & _LENGTH)]


def _known(columns: Sequence[tuple[Column, Ints]], wanted: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the memo indices that anyone takes, ascending, and what is written out there."""
    import numpy as np

    taken: list[Ints] = [np.array(wanted, np.int64)]
    taken += [column.ref[(base >= 0) & (column.ref >= 0)] for column, base in columns]
    asked = np.zeros(max((int(t.max()) for t in taken if len(t)), default=0) + 1, np.bool_)
    for indices in taken:
        asked[indices] = True
    # The last row is beyond every index: a search always ends at a row.
    memos, values = [np.array([1 << 62])], [np.array([-1])]
    for column, base in columns:
        rows = np.flatnonzero((base >= 0) & (column.memo >= 0))
        memo = base[rows] + column.memo[rows]
        some = np.flatnonzero(asked[np.minimum(memo, len(asked) - 1)] & (memo < len(asked)))
        memos.append(memo[some])
        values.append(column.value[rows[some]])
    memo, value = np.concatenate(memos), np.concatenate(values)
    order = np.argsort(memo, kind="stable")
    return memo[order], value[order]


def _resolve(column: Column, cut: Mask, known: tuple[Ints, Ints]) -> None:
    """Put in place of what was taken what is known, or -2 - its memo index; keep only values."""
    import numpy as np

    rows = np.flatnonzero((column.ref >= 0) & cut)
    refs = column.ref[rows]
    memo, values = known
    place = np.searchsorted(memo[:-1], refs)
    column.value[rows] = np.where(memo[place] == refs, values[place], -2 - refs.astype(np.int64))
    column.value[~cut] = 0  # nobody asks for what was not cut out
    column.ref = column.memo = np.empty(0, np.int32)


def _find(known: tuple[Ints, Ints], index: int) -> int | None:
    import numpy as np

    memo, value = known
    place = int(np.searchsorted(memo, index))
    return int(value[place]) if place < len(memo) and memo[place] == index else None
