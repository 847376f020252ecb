"""Cut long runs of records out of a pickle; what is left is a short pickle for the unpickler.

`Walk` reads a pickle opcode by opcode, in order, and hands its pieces on unchanged. Where a run of
records begins that a table has read already, it leaves the run out and goes on behind it. A run is
key, value, key, value, … inside a dict, so one key and one value stand in for it: a persistent id,
which the pickle itself may not use, and None. Whoever loads the rest finds that key where the run
belongs, or something is wrong.

The opcodes of the rest are executed by the one unpickler, with all its rules. The memo is numbered
anew, because the values of runs are not there: what the rest takes from a run is written out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lockstep import Column, Ints, Mask


class DeclinedError(Exception):
    """The pickle is not spelled as expected: it is for the unpickler, whole."""


class Named:
    """Texts and classes that a pickle has memoised, by name.

    Attributes:
        index: name -> memo index it was last seen at; a class's name begins with `GLOBAL`.
        used: (memo index, what must be there) of everything that was asked for.
    """

    GLOBAL = b"\x93"

    def __init__(self) -> None:
        self.index: dict[bytes, int] = {}
        self.used: list[tuple[int, Any]] = []

    def text(self, name: str) -> bytes:
        """Return the opcodes that push a text; KeyError where it is not known yet."""
        index = self.index[name.encode()]
        self.used.append((index, name))
        return push(index)

    def cls(self, name: str, stand_in: type) -> bytes:
        """Return the opcodes that push a class; KeyError where it is not known yet."""
        index = self.index[self.GLOBAL + name.encode()]
        self.used.append((index, stand_in))
        return push(index)


def push(index: int) -> bytes:
    """Return the opcodes that push what the memo has at `index`."""
    if index < 256:
        return b"h" + bytes([index])
    return b"j" + index.to_bytes(4, "little")


@dataclass(kw_only=True, slots=True, eq=False)
class Table(ABC):
    """Rows in the order of the file.

    Attributes:
        start: offset of the first opcode of each record.
        end: offset behind its last.
        memos: how many values it memoises.
        reach: see `Lanes.reach`.
        good: whether it was read whole.
        base: how many values were memoised before it; -1 until the record is cut out.
    """

    start: Ints
    end: Ints
    memos: Ints
    reach: Ints
    good: Mask
    base: Ints = field(init=False)

    def __post_init__(self) -> None:
        import numpy as np

        # There may be millions of rows: places in a pickle are less than `MOST_BYTES`.
        self.start, self.end = self.start.astype(np.int32), self.end.astype(np.int32)
        self.memos = self.memos.astype(np.int32)
        # A memo index has 32 bits without a sign: a large one must not become a small one.
        self.reach = np.minimum(self.reach, MOST_BYTES - 1).astype(np.int32)
        self.base = np.full(len(self.start), -1, np.int32)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield (first, last + 1) of good rows that follow each other without a gap."""
        import numpy as np

        linked = self.good[1:] & self.good[:-1] & (self.end[:-1] == self.start[1:])
        first = np.flatnonzero(self.good & ~np.concatenate(([False], linked)))
        last = np.flatnonzero(self.good & ~np.concatenate((linked, [False]))) + 1
        yield from zip(first.tolist(), last.tolist(), strict=True)

    def enter(self, first: int, last: int, base: int) -> int:
        """Say how many values were memoised before these rows; return how many are after them."""
        import numpy as np

        ends = base + np.cumsum(self.memos[first:last])
        self.base[first:last] = ends - self.memos[first:last]
        return int(ends[-1])

    @abstractmethod
    def texts(self) -> list[tuple[Column, Ints]]:
        """Return the columns of texts, and the `base` of each value in them."""

    def shapes(self) -> list[tuple[Column, Ints]]:
        """Return the columns of sizes and offsets, and the `base` of each value in them."""
        return []

    def objects(self) -> tuple[Ints, Ints]:
        """Return memo indices of other values that records take, and the `base` of each."""
        return self.base[:0], self.base[:0]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Rows of a table that stand where they were cut out.

    Attributes:
        table: the table.
        first: first row.
        last: behind the last row.
    """

    table: Table
    first: int
    last: int


# Opcodes that a rest may hold, by the length of the argument. Not among them: what takes values off
# the stack or sets memo slots by number, persistent ids, and what only old protocols have.
_ARGUMENTS = dict.fromkeys(b")]}(teabRusN\x81\x85\x86\x87\x88\x89\x93\x94", 0) | {
    ord("K"): 1, ord("M"): 2, ord("J"): 4, ord("G"): 8, ord("h"): 1, ord("j"): 4,
}  # fmt: skip
_SHORT_TEXT, _TEXT, _LONG = 0x8C, 0x58, 0x8A
# What may stand behind a run: another key, or the end of the batch.
_BEHIND = frozenset(b"u\x8cXhj")
MOST_BYTES = 1 << 31
# A rest larger than this is no rest.
_SMALL, _SHARE = 64 << 10, 32


class Walk:
    """One pass over a pickle of protocol 4 or later.

    Attributes:
        named: the texts and classes that have passed.
        runs: the runs that were cut out, in order.
        kept: memo index -> memo index in the rest.
        wanted: memo indices that the rest takes from runs.
    """

    def __init__(self, data: bytearray, end: int, joints: Sequence[int] = ()) -> None:
        """Begin at the first byte of a pickle.

        Args:
            data: the pickle without its frames, and some zeros.
            end: its length.
            joints: where frames began, ascending: opcodes must begin there.
        """
        self.named = Named()
        self.runs: list[Run] = []
        self.kept: dict[int, int] = {}
        self.wanted: dict[int, int] = {}
        self._data = data
        self._end = end
        self._ahead: dict[int, Run] = {}
        self._joints = [*joints, MOST_BYTES]
        self._joint = 0
        self._parts: list[bytes] = []
        self._from = 2
        self._size = 0
        self._most = _SMALL + end // _SHARE
        self._memo = 0

    def ahead(self, tables: Iterable[Table]) -> None:
        """Cut out the runs of these tables, and no others that were announced."""
        self._ahead = {
            int(table.start[first]): Run(table, first, last)
            for table in tables
            for first, last in table.runs()
        }

    def walk(self, built: Callable[[int], None], read: Callable[[bytes, int], None]) -> None:
        """Go to the end.

        Args:
            built: is told where an object has just been made.
            read: is told each text that is written out, and where it ends.

        Raises:
            DeclinedError: at anything that is not expected.
        """
        data, named = self._data, self.named
        texts: dict[int, bytes] = {}
        last: bytes | None = None  # the text or class on top of the stack
        at, behind = 2, False
        joints = self._joints
        while True:
            while at >= joints[self._joint]:
                if at > joints[self._joint]:
                    raise DeclinedError
                self._joint += 1
            # All that is passed over is handed on: what is kept for it must not grow before that.
            if at >= self._end or self._size + at - self._from > self._most:
                raise DeclinedError
            run = self._ahead.get(at)
            if run is not None:
                self._cut(at, run)
                at, behind, last = self._from, True, None
                continue
            op = data[at]
            if behind and op not in _BEHIND:
                raise DeclinedError
            behind = False
            if op == 0x94:
                self.kept[self._memo] = len(self.kept)
                if last is not None:
                    texts[self._memo] = last
                    named.index[last] = self._memo
                self._memo, at = self._memo + 1, at + 1
            elif op in (_SHORT_TEXT, _TEXT):
                begin, at = at + (2 if op == _SHORT_TEXT else 5), _behind(data, at)
                last = bytes(data[begin:at])
                read(last, at)
            elif op in (0x68, 0x6A):
                size = 2 if op == 0x68 else 5
                index = int.from_bytes(data[at + 1 : at + size], "little")
                last = texts.get(index)
                if last is not None:
                    named.index[last] = index
                self._take(at, index, size)
                at += size
            elif op == 0x93:
                last = None if last is None else Named.GLOBAL + last
                at += 1
            elif op == 0x2E and at + 1 == self._end and self._joint == len(joints) - 1:
                self._copy(at, at)
                return
            else:
                at, last = _behind(data, at), None
                if op in (0x62, 0x81):
                    built(at)

    def rest(self, written: dict[int, bytes], given: Iterable[int]) -> bytes:
        """Return the pickle that is left: of a pair of the value and a list.

        Args:
            written: opcodes for each memo index that is `wanted`.
            given: memo indices that the list shall hold the values of.

        Raises:
            DeclinedError: with what is written out, the rest is too large.
        """
        # One long text may be taken many times.
        if sum(len(written[index]) for index in self.wanted.values()) > self._most:
            raise DeclinedError
        for place, index in self.wanted.items():
            self._parts[place] = written[index]
        pushes = b"".join(push(self.kept[index]) for index in given)
        return b"\x80\x04" + b"".join(self._parts) + b"](" + pushes + b"e\x86."

    def _cut(self, at: int, run: Run) -> None:
        import numpy as np

        table, first, last = run.table, run.first, run.last
        end = int(table.end[last - 1])
        # An opcode of a row must begin where a frame did. Rows outside of the run do not count:
        # one that nobody reads may begin inside an argument.
        starts, passed = table.start[first:last], at
        while (joint := self._joints[self._joint]) < end:
            row = np.searchsorted(starts, np.int32(joint), "right") - 1
            passed = max(passed, int(starts[row]))
            while passed < joint:
                passed = _behind(self._data, passed)
            if passed != joint:
                raise DeclinedError
            self._joint += 1
        self._copy(at, end)
        self._add(b"J" + len(self.runs).to_bytes(4, "little") + b"QN")
        self.runs.append(run)
        self._memo = table.enter(first, last, self._memo)

    def _take(self, at: int, index: int, size: int) -> None:
        kept = self.kept.get(index)
        if kept == index:
            return
        if index >= self._memo:
            raise DeclinedError
        self._copy(at, at + size)
        if kept is None:
            self.wanted[len(self._parts)] = index
        self._add(b"" if kept is None else push(kept))

    def _copy(self, to: int, resume: int) -> None:
        """Hand on what was passed over up to `to`, and go on from `resume`."""
        self._add(bytes(self._data[self._from : to]))
        self._from = resume

    def _add(self, part: bytes) -> None:
        self._parts.append(part)
        self._size += len(part)
        if self._size > self._most:
            raise DeclinedError


def _behind(data: bytearray, at: int) -> int:
    """Return where the opcode at `at` ends."""
    op = data[at]
    if op in _ARGUMENTS:
        return at + 1 + _ARGUMENTS[op]
    if op in (_SHORT_TEXT, _LONG):
        return at + 2 + data[at + 1]
    if op == _TEXT:
        return at + 5 + int.from_bytes(data[at + 1 : at + 5], "little")
    raise DeclinedError
