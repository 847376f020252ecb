"""The three long dicts of a `.metadata` pickle as tables: one row a record, read in lock-step.

Only records that are spelled as torch spells them get a row that is `good`: the opcodes that
CPython's pickler writes for torch's classes, with everything that repeats taken from the memo.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .dcp_records import (
    TABLE,
    BytesEntry,
    Chunk,
    Index,
    Properties,
    StoredItem,
    TensorEntry,
)
from .lockstep import LANES, Column, Lanes, Shapes
from .pickle_cut import Named, Table
from .pickle_words import Words

if TYPE_CHECKING:
    from .lockstep import Ints, Mask

# NEWOBJ without arguments, and its dict of attributes begun: two values memoised.
_OBJECT = b")\x81\x94}\x94("
_BUILT = b"ub"
# Lock-step pays while many lanes go on: a list that is longer than all others is left.
_FEW, _LONG = 32, 64


@dataclass(kw_only=True, slots=True, eq=False)
class Entries(Table):
    """`state_dict_metadata`: a name, and a TensorStorageMetadata or a BytesStorageMetadata.

    Attributes:
        name: texts.
        tensor: whether it is a tensor.
        dtype: memo index of its element type.
        size: shapes.
        count: number of its chunks.
        first: number of chunks before it; one more row at the end.
        offsets: shapes of all chunks, row by row.
        sizes: the same of their sizes.
    """

    name: Column
    tensor: Mask
    dtype: Ints
    size: Column
    count: Ints
    first: Ints
    offsets: Column
    sizes: Column

    def texts(self) -> list[tuple[Column, Ints]]:
        """See `Table.texts`."""
        return [(self.name, self.base)]

    def shapes(self) -> list[tuple[Column, Ints]]:
        """See `Table.shapes`."""
        import numpy as np

        base = np.repeat(self.base, self.count)
        return [(self.size, self.base), (self.offsets, base), (self.sizes, base)]

    def objects(self) -> tuple[Ints, Ints]:
        """See `Table.objects`."""
        return self.dtype[self.tensor], self.base[self.tensor]


@dataclass(kw_only=True, slots=True, eq=False)
class Items(Table):
    """`storage_data`: a MetadataIndex, and a _StorageInfo.

    Attributes:
        fqn: texts.
        hint: the index; -1 for None.
        placed: whether there is an offset.
        offset: shapes.
        path: texts.
        begin: offset in the file.
        length: number of bytes.
    """

    fqn: Column
    hint: Ints
    placed: Mask
    offset: Column
    path: Column
    begin: Ints
    length: Ints

    def texts(self) -> list[tuple[Column, Ints]]:
        """See `Table.texts`."""
        return [(self.fqn, self.base), (self.path, self.base)]

    def shapes(self) -> list[tuple[Column, Ints]]:
        """See `Table.shapes`."""
        return [(self.offset, self.base)]


class EntryReader:
    """Reads entries that follow one that has passed already."""

    def __init__(self, named: Named, shapes: Shapes) -> None:
        """Learn the opcodes that do not change.

        Raises:
            KeyError: not all of them have passed yet.
        """
        self._shapes = shapes
        self._tensor = self._object = b""
        if Named.GLOBAL + b"BytesStorageMetadata" in named.index:
            self._object = named.cls("BytesStorageMetadata", BytesEntry) + b")\x81\x94"
        if Named.GLOBAL + b"TensorStorageMetadata" in named.index:
            self._tensor = named.cls("TensorStorageMetadata", TensorEntry) + _OBJECT
            self._properties = (
                named.text("properties") + named.cls("TensorProperties", Properties) + b")\x81\x94("
            )
            self._size = named.text("size")
            self._shape = named.cls("Size", TABLE["torch.Size"])
            self._chunks = named.text("chunks") + b"]\x94"
            self._chunk = named.cls("ChunkStorageMetadata", Chunk) + _OBJECT + named.text("offsets")
            self._sizes = named.text("sizes")

    def read(self, words: Words, start: int, end: int) -> list[Table]:
        """Read the entries between `start` and `end`."""
        heads = (self._tensor, self._object)
        return [self._read(words, at) for at in _places(words, heads, start, end)]

    def _read(self, words: Words, at: Ints) -> Entries:
        """Read the entries whose values may begin at some places; the first is never good."""
        import numpy as np

        values = Lanes(words, at)
        tensor = values.follows(self._tensor) if self._tensor else np.zeros(len(at), np.bool_)
        dtype = np.full(len(at), -1, np.int64)
        count = np.zeros(len(at), np.int64)
        size, offsets, sizes = Column.empty(len(at)), Column.empty(0), Column.empty(0)
        rows = np.flatnonzero(tensor)
        if len(rows):
            part = values.select(rows)
            dtype[rows], own, count[rows], offsets, sizes = self._tensors(part)
            size.put(rows, own)
            values.join(rows, part)
        rows = np.flatnonzero(~tensor)
        if len(rows):
            part = values.select(rows)
            part.expect(self._object, memos=1)
            values.join(rows, part)
        # A name begins where the value before it ends, or behind a full batch.
        names = Lanes(words, np.concatenate((at[:1], values.at[:-1])))
        names.skip(b"u(")
        begin = names.at.copy()
        name = names.text()
        good = values.ok & names.ok & (names.at == at)
        good[0] = False
        good[1:] &= values.ok[:-1]
        for column, memos in (
            (size, names.memo),
            (offsets, np.repeat(names.memo, count)),
            (sizes, np.repeat(names.memo, count)),
        ):
            column.memo[column.memo >= 0] += memos[column.memo >= 0].astype(np.int32)
        return Entries(
            start=begin, end=values.at, memos=names.memo + values.memo,
            reach=np.maximum(names.reach, values.reach - names.memo), good=good,
            name=name, tensor=tensor, dtype=dtype, size=size, count=count, first=starts_of(count),
            offsets=offsets, sizes=sizes,
        )  # fmt: skip

    def _tensors(self, lanes: Lanes) -> tuple[Ints, Column, Ints, Column, Column]:
        """Return element type, size, number of chunks, and the chunks' offsets and sizes."""
        lanes.expect(self._tensor + self._properties, memos=3)
        dtype = lanes.reference()
        lanes.reference()  # layout
        lanes.boolean()
        lanes.reference()  # memory format
        lanes.boolean()
        lanes.expect(b"t\x94b" + self._size, memos=1)
        size = lanes.shape(self._shapes, self._shape)
        lanes.expect(self._chunks, memos=1)
        count, offsets, sizes = self._chunk_lists(lanes)
        lanes.expect(_BUILT)
        return dtype, size, count, offsets, sizes

    def _chunk_lists(self, lanes: Lanes) -> tuple[Ints, Column, Column]:
        import numpy as np

        many = lanes.skip(b"(")
        count = np.zeros(len(lanes), np.int64)
        read: list[tuple[Ints, Column, Column]] = []
        rows = np.arange(len(lanes))
        part = lanes
        while True:
            more = part.where(part.follows(self._chunk))
            if not len(more) or (len(read) >= _LONG and len(more) < _FEW):
                break
            rows = rows[more]
            part = lanes.select(rows)
            part.expect(self._chunk, memos=2)
            offsets = part.shape(self._shapes, self._shape)
            part.expect(self._sizes)
            sizes = part.shape(self._shapes, self._shape)
            part.expect(_BUILT)
            read.append((rows, offsets, sizes))
            count[rows] += 1
            lanes.join(rows, part)
        ended = lanes.skip(b"e", many) | lanes.skip(b"a", ~many & (count == 1))
        lanes.ok &= ended | (~many & (count == 0))
        first = starts_of(count)
        columns = Column.empty(int(first[-1])), Column.empty(int(first[-1]))
        for place, (rows, *parts) in enumerate(read):
            for column, its in zip(columns, parts, strict=True):
                column.put(first[rows] + place, its)
        return count, *columns


class ItemReader:
    """Reads items that follow one that has passed already."""

    def __init__(self, named: Named, shapes: Shapes) -> None:
        """Learn the opcodes that do not change.

        Raises:
            KeyError: not all of them have passed yet.
        """
        self._shapes = shapes
        self._head = named.cls("MetadataIndex", Index) + _OBJECT + named.text("fqn")
        self._hint, self._offset = named.text("index"), named.text("offset")
        self._info = named.cls("_StorageInfo", StoredItem) + _OBJECT + named.text("relative_path")
        self._length, self._shape = named.text("length"), named.cls("Size", TABLE["torch.Size"])

    def read(self, words: Words, start: int, end: int) -> list[Table]:
        """Read the items between `start` and `end`."""
        places = _places(words, [self._head], start, end)
        return [self._read(words, at) for at in places]

    def _read(self, words: Words, at: Ints) -> Items:
        import numpy as np

        lanes = Lanes(words, at)
        lanes.expect(self._head, memos=2)
        fqn = lanes.text()
        lanes.expect(self._hint)
        hint = np.full(len(at), -1, np.int64)
        rows = np.flatnonzero(~lanes.skip(b"N"))
        part = lanes.select(rows)
        hint[rows] = part.integer()
        lanes.join(rows, part)
        offset = Column.empty(len(at))
        placed = lanes.skip(self._offset)
        rows = np.flatnonzero(placed)
        part = lanes.select(rows)
        offset.put(rows, part.shape(self._shapes, self._shape))
        lanes.join(rows, part)
        lanes.expect(_BUILT + self._info, memos=2)
        path = lanes.text()
        lanes.expect(self._offset)
        begin = lanes.integer()
        lanes.expect(self._length)
        length = lanes.integer()
        lanes.expect(_BUILT)
        return Items(
            start=at, end=lanes.at, memos=lanes.memo, reach=lanes.reach, good=lanes.ok,
            fqn=fqn, hint=hint, placed=placed, offset=offset, path=path, begin=begin,
            length=length,
        )  # fmt: skip


def _places(words: Words, heads: Iterable[bytes], start: int, end: int) -> Iterator[Ints]:
    """Yield where heads begin, in blocks: where records may begin, no more than that."""
    import numpy as np

    found = [words.find(head[:8], start, end) for head in heads if head]
    return blocks(np.sort(np.concatenate(found)))


def blocks(places: Ints) -> Iterator[Ints]:
    """Yield so many places at a time as lanes are moved together."""
    for first in range(0, len(places), LANES):
        yield places[first : first + LANES]


def starts_of(count: Ints) -> Ints:
    """Return where the members of each row begin, and where the last end."""
    import numpy as np

    return np.concatenate((np.zeros(1, np.int64), np.cumsum(count)))
