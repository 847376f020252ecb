"""A pickle without its bytes objects, which are found in the file and not read.

A pickle of tens of gigabytes is mostly the bytes of tensors and arrays. It is walked opcode by
opcode; a reference takes the place of each bytes object, and what stays is short enough for the one
unpickler.

Sources: CPython's `Modules/_pickle.c` and `Lib/pickletools.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple, NoReturn

from ftckpt.errors import CorruptError, NoResourceError, TruncatedError, UnsafeError
from ftckpt.extents import Read
from ftckpt.workers.budget import budget

from .inert import refuse
from .walk import MAX_LEAVES


class BytesObject(NamedTuple):
    """A bytes object in the pickle: where its opcode begins, and where its bytes do."""

    opcode: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Where they end."""
        return self.offset + self.length


_WINDOW = 256 << 10
# What a pickle may have besides its bytes objects; the largest real ones have a few MB.
_MOST_REST = 256 << 20
_BYTES = {ord("C"): 1, ord("B"): 4, 0x8E: 8, 0x96: 8}
_FRAME, _STOP, _PROTO = 0x95, 0x2E, 0x80
_OUTSIDE = frozenset(b"PQ")
_LINES = {ord("c"): 2, ord("i"): 2}


@cache
def _lengths() -> Mapping[int, int]:
    """Return how long the argument of each opcode is, as pickletools counts it."""
    import pickletools

    return {ord(op.code): op.arg.n if op.arg else 0 for op in pickletools.opcodes}


class Outline:
    """A pickle without its bytes objects.

    Attributes:
        payloads: what was left out, in order.
    """

    def __init__(self, read: Read, size: int, file: str, base: int) -> None:
        self.payloads: list[BytesObject] = []
        self._read, self._size, self._file, self._base = read, size, file, base
        self._window, self._from = b"", 0
        self._parts: list[bytes | int] = []
        self._length = 0
        self._walk()

    def rest(self, left_out: frozenset[int]) -> bytes:
        """Return the pickle; what is left out of it are references by number.

        Raises:
            NoResourceError: what is put back needs more memory than there is.
        """
        back = sum(p.length for i, p in enumerate(self.payloads) if i not in left_out)
        if back > min(_MOST_REST, budget() // 4):
            raise NoResourceError(
                f"{self._file} holds {back} bytes that are no tensor and no array",
                hint="raise --max-memory, or save them beside the pickle",
                file=self._file,
            )
        parts = []
        for part in self._parts:
            if isinstance(part, bytes):
                parts.append(part)
            elif part in left_out:
                parts.append(b"J" + part.to_bytes(4, "little") + b"Q")
            else:
                payload = self.payloads[part]
                parts.append(self._read(payload.opcode, payload.end - payload.opcode))
        return b"".join(parts)

    def _walk(self) -> None:
        lengths, at, frame = _lengths(), 0, 0
        copied = 0  # what lies before it was handed on, or left out
        while True:
            data, start = self._ahead(at, 16), at
            op = data[0]
            if op in _BYTES:
                self._hand_on(copied, at)
                copied = at = self._leave_out(data, at)
            elif op == _FRAME:
                # Frames say what to read at once. They are cut where bytes are left out.
                self._hand_on(copied, at)
                if at < frame:
                    self._damaged(at)
                copied = at = at + 9
                frame = at + int.from_bytes(data[1:9], "little")
                if frame > self._size:
                    self._cut_short()
            elif op in _OUTSIDE:
                refuse("refers to outside storage where there is none")
            elif op == _PROTO and at:
                self._damaged(at)
            else:
                at = self._behind(at, op, lengths)
            if start < frame < at and op != _FRAME:
                self._damaged(start)  # an opcode reaches over the end of its frame
            if at > self._size:
                self._cut_short()
            if at - copied >= _WINDOW or op == _STOP:
                self._hand_on(copied, at)
                copied = at
            if op == _STOP:
                self._end(at)
                return

    def _behind(self, at: int, op: int, lengths: Mapping[int, int]) -> int:
        """Return where the opcode ends that begins at `at`."""
        length = lengths.get(op)
        if length is None:
            self._damaged(at)
        if length >= 0:
            return at + 1 + length
        if length == -1:  # to the end of a line, or of two
            at += 1
            for _ in range(_LINES.get(op, 1)):
                line = self._ahead(at, _WINDOW)
                end = line.find(b"\n")
                if end < 0:
                    self._damaged(at)
                at += end + 1
            return at
        width = {-2: 1, -3: 4, -4: 4, -5: 8}[length]
        counted = int.from_bytes(self._ahead(at, 1 + width)[1 : 1 + width], "little")
        return at + 1 + width + counted

    def _leave_out(self, data: bytes, at: int) -> int:
        width = _BYTES[data[0]]
        begin = at + 1 + width
        length = int.from_bytes(data[1 : 1 + width], "little")
        if begin + length > self._size:
            self._cut_short()
        if len(self.payloads) == MAX_LEAVES:
            raise UnsafeError(
                f"{self._file} holds more than {MAX_LEAVES} bytes objects",
                kind="unsafe-pickle", file=self._file,
            )  # fmt: skip
        self._parts.append(len(self.payloads))
        self.payloads.append(BytesObject(at, begin, length))
        return begin + length

    def _hand_on(self, start: int, end: int) -> None:
        if end > self._size:
            self._cut_short()
        self._length += end - start
        if self._length > min(_MOST_REST, budget() // 4):
            raise NoResourceError(
                f"{self._file} has more than {self._length} bytes besides its tensors",
                file=self._file,
            )
        if start < end:
            begin = start - self._from
            held = begin >= 0 and end - self._from <= len(self._window)
            found = self._window[begin:][: end - start] if held else self._read(start, end - start)
            self._parts.append(found)

    def _ahead(self, at: int, length: int) -> bytes:
        """Return the next bytes, up to a number of them; fewer where the file ends."""
        begin = at - self._from
        if not 0 <= begin <= len(self._window) - length:
            most = min(_WINDOW, self._size - at)
            if most <= 0:
                self._cut_short()
            if begin < 0 or at + length > self._from + len(self._window):
                self._window, self._from, begin = self._read(at, most), at, 0
        return self._window[begin : begin + length]

    def _end(self, at: int) -> None:
        if at != self._size:
            raise UnsafeError(
                f"the pickle in {self._file} hides bytes after its end",
                kind="unsafe-pickle", file=self._file,
                offset=self._base + at, length=self._size - at,
            )  # fmt: skip

    def _cut_short(self) -> NoReturn:
        raise TruncatedError(
            f"{self._file} ends before its pickle does: it was cut while being written or copied",
            file=self._file, offset=self._base + self._size,
        )  # fmt: skip

    def _damaged(self, at: int) -> NoReturn:
        raise CorruptError(
            f"the pickle in {self._file} is damaged at byte {self._base + at}",
            kind="bad-pickle", file=self._file, offset=self._base + at,
        )  # fmt: skip
