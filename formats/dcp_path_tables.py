"""The paths of `planner_data` as tables (see `dcp_tables`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .dcp_tables import blocks, starts_of
from .lockstep import Column, Lanes
from .pickle_cut import Table
from .pickle_words import Words

if TYPE_CHECKING:
    from .lockstep import Ints

# A text's memo, and a dict begun.
_BEGUN = b"\x94}\x94("
_MOST_KEYS = 16


@dataclass(kw_only=True, slots=True, eq=False)
class Paths(Table):
    """`planner_data`: a name, and a tuple of keys that are texts.

    Attributes:
        name: texts.
        count: number of keys.
        first: number of keys before it; one more row at the end.
        keys: texts of all paths, row by row.
    """

    name: Column
    count: Ints
    first: Ints
    keys: Column

    def texts(self) -> list[tuple[Column, Ints]]:
        """See `Table.texts`."""
        import numpy as np

        return [(self.name, self.base), (self.keys, np.repeat(self.base, self.count))]


def read_paths(words: Words, start: int, end: int) -> list[Table]:
    """Read the paths between `start` and `end`: the first, and those behind another's tuple."""
    import numpy as np

    ends, begins = np.zeros((2, 256), np.bool_)
    ends[list(b"t\x85\x86\x87")] = begins[list(b"u\x8cXhj")] = True
    memos = words.find(b"\x94", start, end)
    at = memos[ends[words.bytes_at(memos - 1)] & begins[words.bytes_at(memos + 1)]] + 1
    at = np.concatenate(([start + len(_BEGUN)], at))
    return [_read_paths(words, block) for block in blocks(at)]


def _read_paths(words: Words, at: Ints) -> Paths:
    import numpy as np

    lanes = Lanes(words, at)
    lanes.skip(b"u(")  # behind a full batch
    start = lanes.at.copy()
    name = lanes.text()
    marked = lanes.skip(b"(")
    count = np.zeros(len(at), np.int64)
    read: list[tuple[Ints, Column]] = []
    rows = np.arange(len(at))
    part = lanes
    for _ in range(_MOST_KEYS):
        more = part.where(part.begins_text())
        if not len(more):
            break
        rows = rows[more]
        part = lanes.select(rows)
        read.append((rows, part.text()))
        lanes.join(rows, part)
        count[rows] += 1
    lanes.close_tuple(count, marked)
    lanes.ok &= count > 0
    first = starts_of(count)
    keys = Column.empty(int(first[-1]))
    for place, (rows, column) in enumerate(read):
        keys.put(first[rows] + place, column)
    # The last letter of a key may be a tuple's opcode: what begins behind it is no record, and
    # would stand between two that follow each other.
    rows = np.flatnonzero(lanes.ok)
    keys = keys.take(np.flatnonzero(np.repeat(lanes.ok, count)))
    count, lanes = count[rows], lanes.select(rows)
    return Paths(
        start=start[rows], end=lanes.at, memos=lanes.memo, reach=lanes.reach, good=lanes.ok,
        name=name.take(rows), count=count, first=starts_of(count), keys=keys,
    )  # fmt: skip
