"""Many records of one pickle, read in lock-step: one opcode of each at a time.

A pickler writes alike objects as alike opcodes, and only arguments differ: numbers, texts, memo
indices. `Lanes` holds a position in each of many records and moves them all by one opcode with a
few numpy operations, a hundred times faster than reading one record after another.

Nothing is skipped unread: a lane goes on only over opcodes that it has compared. One that meets
anything else is out (`ok`), and its record is another reader's matter.

Source of the opcodes: CPython's `Lib/pickletools.py`. Protocol 4 and later: MEMOIZE counts by
itself, so the memo index of a value is the number of values memoised before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .pickle_words import WINDOW, Words, as_word

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.signedinteger[Any]]
    Mask = npt.NDArray[np.bool_]

# Lanes that are moved together: their numbers stay in the processor's cache.
LANES = 1 << 13
# A text's place in one number: the offset of its bytes above, their number below.
TEXT_BITS = 24
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
_MAX_DIMENSIONS = 8


@dataclass(slots=True, eq=False)
class Column:
    """One value of each lane, which a pickle writes out or takes from its memo.

    Attributes:
        value: what was written out: a packed place of a text, or an id of `Shapes`; else -1.
        ref: memo index that it was taken from, else -1.
        memo: memo index that it was given, counted from the record's start; -1 where taken.
    """

    value: Ints
    ref: npt.NDArray[np.int32]
    memo: npt.NDArray[np.int32]

    @classmethod
    def empty(cls, n: int) -> Column:
        """Return a column of nothing."""
        import numpy as np

        return cls(np.full(n, -1, np.int64), np.full(n, -1, np.int32), np.full(n, -1, np.int32))

    def take(self, rows: Ints) -> Column:
        """Return the values of some lanes."""
        return Column(self.value[rows], self.ref[rows], self.memo[rows])

    def put(self, rows: Ints, other: Column) -> None:
        """Write the values of some lanes."""
        self.value[rows], self.ref[rows], self.memo[rows] = other.value, other.ref, other.memo


class Shapes:
    """Sizes and offsets, each once.

    Attributes:
        known: the tuples, by id.
    """

    def __init__(self) -> None:
        self.known: list[tuple[int, ...]] = []
        self._ids: dict[tuple[int, ...], int] = {}

    def id_of(self, shape: tuple[int, ...]) -> int:
        """Return the id of one tuple."""
        found = self._ids.setdefault(shape, len(self.known))
        if found == len(self.known):
            self.known.append(shape)
        return found

    def ids_of(self, rank: Ints, numbers: list[Ints]) -> Ints:
        """Return the ids of many tuples: `rank` numbers each, the k-th of all in `numbers[k]`."""
        import numpy as np

        if not len(rank):
            return np.empty(0, np.int64)
        # Rows are told apart by one number each, a sum with odd factors modulo 2**64.
        mixed = rank.astype(np.uint64)
        for place, column in enumerate(numbers):
            factor = np.uint64(0x9E3779B97F4A7C15 + 2 * place * 0x5851F42D)
            mixed += column.astype(np.uint64) * factor
        _, first, which = np.unique(mixed, return_index=True, return_inverse=True)
        same = all(bool((c == c[first][which]).all()) for c in (rank, *numbers))
        if not same:  # two tuples, one sum: each by itself
            first = which = np.arange(len(rank))
        ids = [
            self.id_of(tuple(int(column[row]) for column in numbers[: rank[row]]))
            for row in first.tolist()
        ]
        return np.array(ids, np.int64)[which]


class Lanes:
    """A place in each of many records.

    Attributes:
        at: where each lane is.
        memo: how many values it has memoised.
        ok: whether it met nothing but what it was told to expect.
        reach: the largest of (memo index taken - `memo` at that time): it must be less than the
            number of values that were memoised before the record.
    """

    def __init__(self, words: Words, at: Ints) -> None:
        import numpy as np

        self._words = words
        self._window: npt.NDArray[np.uint8] | None = None
        self._passed = 0  # so many bytes of the window
        self.at = at.astype(np.int64)
        self.memo = np.zeros(len(at), np.int64)
        self.ok = np.ones(len(at), np.bool_)
        self.reach = np.full(len(at), -1 << 30, np.int64)

    def __len__(self) -> int:
        return len(self.at)

    def select(self, rows: Ints) -> Lanes:
        """Return some lanes, to be moved by themselves; `join` takes them back."""
        import numpy as np

        if len(rows) == len(self):
            return self
        part = Lanes(self._words, self.at[rows])
        part.memo, part.ok, part.reach = self.memo[rows], self.ok[rows], self.reach[rows]
        assert part.at.dtype == np.int64
        return part

    def join(self, rows: Ints, part: Lanes) -> None:
        """Take back lanes from `select`."""
        if part is self:
            return
        self._window = None
        self.at[rows], self.memo[rows] = part.at, part.memo
        self.ok[rows], self.reach[rows] = part.ok, part.reach

    def where(self, mask: Mask) -> Ints:
        """Return the numbers of the lanes that are in `mask` and not out."""
        import numpy as np

        return np.flatnonzero(mask & self.ok)

    def follows(self, expected: bytes) -> Mask:
        """Return which lanes have these bytes next."""
        import numpy as np

        same = np.ones(len(self), np.bool_)
        for start in range(0, len(expected), 8):
            wanted, mask = as_word(expected[start : start + 8])
            word = self._word(start)
            same &= (word if mask == -1 else word & mask) == wanted
        return same

    def expect(self, expected: bytes, memos: int = 0) -> None:
        """Pass over opcodes that every lane must have, which memoise so many values."""
        self.ok &= self.follows(expected)
        self._move(len(expected))
        self.memo += memos

    def skip(self, expected: bytes, mask: Mask | None = None) -> Mask:
        """Pass over opcodes that lanes (of `mask`) may have; return which had them."""
        import numpy as np

        had = self.follows(expected)
        if mask is not None:
            had &= mask
        self._move(np.where(had, len(expected), 0))
        return had

    def boolean(self) -> None:
        """Pass over a True or a False."""
        op = self._op()
        self.ok &= (op == 0x88) | (op == 0x89)
        self._move(1)

    def reference(self) -> Ints:
        """Pass over a value that is taken from the memo; return its index."""
        import numpy as np

        word = self._word()
        op = word & 0xFF
        short, long = op == ord("h"), op == ord("j")
        self.ok &= short | long
        index: Ints = np.where(short, (word >> 8) & 0xFF, (word >> 8) & 0xFFFFFFFF)
        np.maximum(self.reach, index - self.memo, out=self.reach)
        self._move(np.where(short, 2, 5))
        return index

    def integer(self) -> Ints:
        """Pass over an int from 0 to 2**63 - 1; return it."""
        import numpy as np

        word = self._word()
        op = word & 0xFF
        for code, size, value in (
            ("K", 2, (word >> 8) & 0xFF), ("M", 3, (word >> 8) & 0xFFFF), ("J", 5, word << 24 >> 32)
        ):  # fmt: skip
            if (op == ord(code)).all():
                self.ok &= value >= 0
                self._move(size)
                return value
        sizes = [op == ord("K"), op == ord("M"), op == ord("J"), op == 0x8A]
        count = np.where(sizes[3], (word >> 8) & 0xFF, 0)
        self.ok &= (sizes[0] | sizes[1] | sizes[2] | sizes[3]) & (count <= 8)
        long = self._word(2)
        # LONG1 drops leading bytes that say nothing: what is above them must be zero, or the sign.
        unused = np.clip(64 - 8 * count, 0, 63)
        long = np.where(count == 0, 0, (long << unused) >> unused)
        arguments = [(word >> 8) & 0xFF, (word >> 8) & 0xFFFF, (word << 24) >> 32, long]
        value = np.select(sizes, arguments, -1)
        self.ok &= value >= 0
        self._move(np.select(sizes, [2, 3, 5, 2 + count], 1))
        return value

    def begins_text(self) -> Mask:
        """Return which lanes have a text next, or something that is taken from the memo."""
        op = self._op()
        begins: Mask = (op == 0x8C) | (op == ord("h")) | (op == ord("j")) | (op == ord("X"))
        return begins

    def text(self) -> Column:
        """Pass over a text, which is memoised where it is written out."""
        import numpy as np

        column = Column.empty(len(self))
        first = self._op()
        taken = (first == ord("h")) | (first == ord("j"))
        rows = np.flatnonzero(taken)
        if len(rows):
            part = self.select(rows)
            column.ref[rows] = part.reference()
            self.join(rows, part)
        rows = np.flatnonzero(~taken)
        if len(rows):
            part = self.select(rows)
            word = part._word()
            op = word & 0xFF
            short, long = op == 0x8C, op == ord("X")
            length = np.where(short, (word >> 8) & 0xFF, (word >> 8) & 0xFFFFFFFF)
            part.ok &= (short | long) & (length < 1 << TEXT_BITS)
            start = part.at + np.where(short, 2, 5)
            part._move(length + np.where(short, 2, 5))
            column.value[rows] = start << TEXT_BITS | length
            column.memo[rows] = part.memo
            part.expect(b"\x94", memos=1)
            self.join(rows, part)
        return column

    def close_tuple(self, count: Ints, marked: Mask) -> None:
        """Pass over the end of a tuple of `count` values, and its memo: as a pickler writes it."""
        import numpy as np

        op = self._op()
        plain = np.array([ord(code) for code in _TUPLES])[np.minimum(count, 3)]
        self.ok &= np.where(marked, (op == ord("t")) & (count > 3), (op == plain) & (count < 4))
        self._move(1)
        some = count > 0
        self.ok &= ~some | (self._op() == 0x94)
        self._move(np.where(some, 1, 0))
        self.memo += some

    def shape(self, shapes: Shapes, size: bytes) -> Column:
        """Pass over a `torch.Size`: the opcodes `size` push the class.

        It is called with one tuple, and every value on the way is memoised.
        """
        import numpy as np

        column = Column.empty(len(self))
        new = self.follows(size)
        rows = np.flatnonzero(~new)
        if len(rows):
            part = self.select(rows)
            column.ref[rows] = part.reference()
            self.join(rows, part)
        rows = np.flatnonzero(new)
        if len(rows):
            part = self.select(rows)
            part.expect(size)
            marked = part.skip(b"(")
            rank, numbers = part._integers()
            part.close_tuple(rank, marked)
            part.expect(b"\x85\x94R", memos=1)
            column.memo[rows] = part.memo
            part.expect(b"\x94", memos=1)
            good = np.flatnonzero(part.ok)
            column.value[rows[good]] = shapes.ids_of(rank[good], [n[good] for n in numbers])
            self.join(rows, part)
        return column

    def _integers(self) -> tuple[Ints, list[Ints]]:
        """Pass over as many ints as follow; return how many, and the k-th of all lanes."""
        import numpy as np

        rank = np.zeros(len(self), np.int64)
        numbers: list[Ints] = []
        for _ in range(_MAX_DIMENSIONS):
            op = self._op()
            rows = self.where((op == ord("K")) | (op == ord("M")) | (op == ord("J")) | (op == 0x8A))
            if not len(rows):
                break
            part = self.select(rows)
            numbers.append(np.zeros(len(self), np.int64))
            numbers[-1][rows] = part.integer()
            rank[rows] += 1
            self.join(rows, part)
        return rank, numbers

    def _op(self) -> npt.NDArray[np.uint8]:
        self._look(1)
        assert self._window is not None
        return self._window[:, self._passed]

    def _word(self, ahead: int = 0) -> Ints:
        """Return eight bytes of each lane, so many bytes ahead."""
        self._look(ahead + 8)
        assert self._window is not None
        at = self._passed + ahead
        word: Ints = self._window[:, at : at + 8].view("<i8")[:, 0]
        return word

    def _look(self, count: int) -> None:
        """Have so many bytes of each lane in the window."""
        if self._window is None or self._passed + count > WINDOW:
            self._window, self._passed = self._words.windows(self.at), 0

    def _move(self, count: Ints | int) -> None:
        import numpy as np

        self.at += count
        np.minimum(self.at, self._words.end, out=self.at)
        if isinstance(count, int):
            self._passed += count
            return
        # Lanes that are out do not count: what they read decides nothing.
        counts = count[self.ok]
        if len(counts) and (counts == counts[0]).all():
            self._passed += int(counts[0])
        else:
            self._window = None
