"""Lay out the zip container of `torch.save`, byte for byte as torch 2.13 writes it.

An archive may begin anywhere in a file: the items of a distributed checkpoint are archives one
after the other. All offsets inside it, and the alignment of its records, count from its own begin.

torch stores the CRC-32 of a record behind its bytes (a data descriptor) and again in the directory
at the end, so both can be made when the data is there. The directory also says how all records
together look: the serialization id combines their CRCs.

Sources: `caffe2/serialize/inline_container.cc` (records, padding, serialization id), `miniz`
(headers, zip64); PKWARE APPNOTE 6.3 section 4.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from ftckpt.transfer.layout import Checksums, Literal, Segment

from .zip_directory import combined_crcs

ALIGNMENT = 64

_LOCAL = Struct("<4s5H3I2H")
_CENTRAL = Struct("<4s6H3I5HII")
_END64 = Struct("<4sQHHIIQQQQ")
_LOCATOR = Struct("<4sIQI")
_END = Struct("<4s4HIIH")
_U16, _U32 = 0xFFFF, 0xFFFFFFFF
_UTF8, _DESCRIBED = 0x0800, 0x0808


class ZipRecord(NamedTuple):
    """One record: its name without the archive's folder, and its bytes in order."""

    name: str
    segments: Sequence[Segment]


class _Entry(NamedTuple):
    """A record as the directory lists it; `crc` is None until the data is there."""

    name: bytes
    header: int
    size: int
    crc: int | None


class _Descriptor(Checksums):
    """What follows the bytes of a record: its CRC-32 and its size."""

    def __init__(self, start: int, size: int, wide: bool) -> None:
        self.nbytes = 24 if wide else 16
        self.ranges = ((start, start + size),)
        self._size = size

    def build(self, crcs: Sequence[int]) -> bytes:
        """Return the descriptor."""
        return _descriptor(crcs[0], self._size, self.nbytes == 24)


class _Plan(NamedTuple):
    """What an archive's end is made of, offsets counted from the archive's begin.

    Attributes:
        text: what is known between the descriptor of the last record of data and the id.
        at: where the serialization id's header begins.
        entries: all records but the id.
        ranges: the records of data, in order.
        folder: of the archive.
        nbytes: length of the end.
    """

    text: bytes
    at: int
    entries: tuple[_Entry, ...]
    ranges: tuple[tuple[int, int], ...]
    folder: str
    nbytes: int


class Ending(Checksums):
    """All that follows the last record of data: nothing but CRCs is unknown in it."""

    __slots__ = ("_base", "_plan")

    def __init__(self, plan: _Plan, base: int) -> None:
        self._plan, self._base = plan, base

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Its length."""
        return self._plan.nbytes

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:  # type: ignore[override]
        """The bytes of the records of data, in the file."""
        return [(self._base + start, self._base + stop) for start, stop in self._plan.ranges]

    def at(self, base: int) -> Ending:
        """Return the end of an equal archive that begins elsewhere."""
        return Ending(self._plan, base)

    def build(self, crcs: Sequence[int]) -> bytes:
        """Return the last descriptor, the records without data, the directory and the end."""
        return _ending(self._plan, crcs)


def _ending(plan: _Plan, crcs: Sequence[int]) -> bytes:
    made = bytearray()
    if plan.ranges:
        last = next(e for e in reversed(plan.entries) if e.crc is None)
        made += _descriptor(crcs[-1], last.size, last.size >= _U32 or last.header >= _U32)
    made += plan.text
    left = iter(crcs)
    entries = [e if e.crc is not None else e._replace(crc=next(left)) for e in plan.entries]
    names = combined_crcs(crc32(e.name) for e in entries)
    values = combined_crcs(e.crc or 0 for e in entries if e.size)
    data = f"{names:020d}{values:020d}".encode()
    name = f"{plan.folder}/.data/serialization_id".encode()
    entries.append(_Entry(name, plan.at, len(data), crc32(data)))
    record = _header(name, plan.at, len(data)) + data
    record += _descriptor(crc32(data), len(data), plan.at >= _U32)
    listed = b"".join(map(_listed, entries))
    start = plan.at + len(record)
    return bytes(made) + record + listed + _end(len(entries), start, start + len(listed))


def lay_out(
    records: Iterable[ZipRecord], *, folder: str = "archive", base: int = 0
) -> list[Segment]:
    """Return the segments of an archive; the last is an `Ending` where any data is to come.

    Args:
        records: in the order in which they are to stand; the serialization id is added.
        folder: what every record's name begins with: `archive`, or the stem of the file's name.
        base: where the archive begins in its file.
    """
    made: list[Segment] = []
    text = bytearray()  # what is known since the last segment of data
    entries: list[_Entry] = []
    ranges: list[tuple[int, int]] = []
    pending: _Descriptor | None = None
    at = 0
    for record in records:
        name = f"{folder}/{record.name}".encode()
        size = sum(segment.nbytes for segment in record.segments)
        head = _header(name, at, size)
        wide = size >= _U32 or at >= _U32
        text += head
        if all(type(segment) is Literal for segment in record.segments):
            data = b"".join(s.data for s in record.segments if type(s) is Literal)
            text += data + (_descriptor(crc32(data), size, wide) if size else b"")
            entries.append(_Entry(name, at, size, crc32(data)))
        elif not size:
            entries.append(_Entry(name, at, 0, 0))
        else:
            start = at + len(head)
            ranges.append((start, start + size))
            if pending is not None:
                made.append(pending)
            made += (Literal(bytes(text)), *record.segments)
            pending = _Descriptor(base + start, size, wide)
            text.clear()
            entries.append(_Entry(name, at, size, None))
        at += len(head) + size + (0 if not size else 24 if wide else 16)
    plan = _Plan(bytes(text), at, tuple(entries), tuple(ranges), folder, 0)
    plan = plan._replace(nbytes=len(_ending(plan, [0] * len(ranges))))
    return [*made, Ending(plan, base)] if ranges else [Literal(_ending(plan, ()))]


def _header(name: bytes, at: int, size: int) -> bytes:
    """Return a local header, padded so that the record's bytes begin at the alignment.

    Sizes and CRC stand in the descriptor. miniz announces a wide record by a zip64 field, in which
    the packed size is not known yet.
    """
    extra = _zip64(size, 0, at)
    gap = -(at + _LOCAL.size + len(name) + len(extra) + 4) % ALIGNMENT
    extra += b"FB" + gap.to_bytes(2, "little") + b"Z" * gap
    flags = _DESCRIBED if size else _UTF8
    return _LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def _zip64(size: int, packed: int, at: int) -> bytes:
    """Return the field of what does not fit into 32 bits; nothing where all does."""
    wide = ([size, packed] if size >= _U32 else []) + ([at] if at >= _U32 else [])
    if not wide:
        return b""
    body = b"".join(value.to_bytes(8, "little") for value in wide)
    return b"\1\0" + len(body).to_bytes(2, "little") + body


def _descriptor(crc: int, size: int, wide: bool) -> bytes:
    length = 8 if wide else 4
    return b"PK\7\10" + crc.to_bytes(4, "little") + size.to_bytes(length, "little") * 2


def _listed(entry: _Entry) -> bytes:
    name, at, size, crc = entry
    extra = _zip64(size, size, at)
    flags = _DESCRIBED if size else _UTF8
    known = (0, 0, flags, 0, 0, 0, crc or 0, min(size, _U32), min(size, _U32))
    lengths = (len(name), len(extra), 0, 0, 0, 0, min(at, _U32))
    return _CENTRAL.pack(b"PK\1\2", *known, *lengths) + name + extra


def _end(count: int, start: int, stop: int) -> bytes:
    """Return the zip64 end record, its locator and the end record: torch writes all three."""
    length = stop - start
    few = min(count, _U16)
    return (
        _END64.pack(b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, length, start)
        + _LOCATOR.pack(b"PK\6\7", 0, stop, 1)
        + _END.pack(b"PK\5\6", 0, 0, few, few, min(length, _U32), min(start, _U32), 0)
    )
