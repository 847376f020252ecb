"""The zip container of `torch.save`, read strictly and by its directory alone.

A checkpoint reader may not be cleverer than torch's: where two readers could see different content
(a duplicate name, bytes before or after the archive, two directories that disagree) the archive is
refused. What is merely cut short or overwritten is damage.

Sources: PKWARE APPNOTE 6.3 sections 4.3 and 4.4; `caffe2/serialize/inline_container.cc` for the
writer's alignment, data descriptors and serialization id; `miniz` for the ever present zip64 end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from struct import Struct
from typing import NamedTuple, NoReturn

from ftckpt.errors import CorruptError, UnsafeError, UnsupportedError
from ftckpt.extents import Read

# One read of this size at the end holds the directory of most files.
TAIL = 64 << 10

_EOCD = Struct("<4s4HIIH")
_LOCATOR = Struct("<4sIQI")
_EOCD64 = Struct("<4sQHHIIQQQQ")
_CENTRAL = Struct("<4s6H3I5HII")
LOCAL_HEADER = Struct("<4s5H3I2H")
_ENDS = _EOCD64.size + _LOCATOR.size + _EOCD.size
_U16, _U32 = 0xFFFF, 0xFFFFFFFF
_DESCRIPTOR_FLAG, _UTF8_FLAG = 0x0008, 0x0800
_FLAGS = frozenset((0, _DESCRIPTOR_FLAG, _UTF8_FLAG, _DESCRIPTOR_FLAG | _UTF8_FLAG))
_ALIGNMENTS = tuple(1 << bits for bits in range(6, 21))
# Torch's reader needs `PREFIX/version` and `PREFIX/data.pkl`; a flipped bit leaves some of these.
_OF_TORCH = (
    b"data.pkl", b"/data/", b"/.data/", b"/version", b"/byteorder", b"/constants.pkl",
    b".format_version", b".storage_alignment", b"serialization_id",
)  # fmt: skip
# More of a first record's name is not looked at.
_HEAD_NAME = 256
# Names of another program's archive that are shown.
_SHOWN = 3
_CUT = "the file ends early or its end was overwritten: it was cut while being written or copied"


class Member(NamedTuple):
    """One record of the archive.

    Attributes:
        name: without the archive's prefix: `data.pkl`, `data/0`.
        offset: of its bytes, absolute in the file.
        size: of its bytes.
        crc32: of its bytes; None where the writer did not compute it (0 on a non-empty record).
        header_offset: of its local header, relative to the start of the archive.
        flags: general purpose bits of the directory entry.
    """

    name: str
    offset: int
    size: int
    crc32: int | None
    header_offset: int
    flags: int


# Bit 4 of the external attributes: miniz, torch's reader, takes such a record for a folder and
# reads nothing of it, so that a tensor is what the memory held before.
_FOLDER = 0x10
# Python's `zipfile` refuses what needs a later version than 6.3; torch writes 0.
_VERSION = 63
# The versions in the zip64 end record, as miniz writes them.
_END_VERSIONS = (0x031E, 45)


class Archive(NamedTuple):
    """A zip whose directory was read.

    Attributes:
        prefix: the folder that every name starts with.
        members: by name without the prefix, in the order of their bytes.
        base: where the archive starts in the file.
        size: of the archive in bytes.
        directory: offset of the central directory, relative to the start of the archive.
        odd: header fields with values that torch never writes, and that no reader of torch's uses.
    """

    prefix: str
    members: Mapping[str, Member]
    base: int
    size: int
    directory: int
    odd: tuple[str, ...] = ()


class _Place(NamedTuple):
    """Where an archive lies, and how to say what is wrong with it."""

    file: str
    base: int
    size: int

    def damaged(self, what: str, offset: int = 0, length: int | None = None) -> NoReturn:
        raise CorruptError(
            f"the torch.save archive in {self.file} is damaged: {what}",
            kind="bad-zip",
            file=self.file,
            offset=self.base + offset,
            length=self.size - offset if length is None else length,
        )

    def unsafe(self, what: str, offset: int = 0, length: int | None = None) -> NoReturn:
        raise UnsafeError(
            f"the torch.save archive in {self.file} is refused: {what}",
            hint="two readers would see different content; find out who wrote it",
            kind="unsafe-zip",
            file=self.file,
            offset=self.base + offset,
            length=length,
        )


def read_archive(read: Read, size: int, *, file: str, base: int = 0, tail: int = TAIL) -> Archive:
    """Read the directory of the archive that `read` shows.

    Costs one read at the end, and a second one where the directory is longer than `tail`. Local
    headers are read only for a record that no known writer's alignment explains.

    Args:
        read: returns `length` bytes at `offset`, both relative to the start of the archive.
        size: of the archive, in bytes.
        file: its file, for messages.
        base: where the archive starts in that file; added to what is returned and reported.
        tail: length of the first read.

    Raises:
        CorruptError: it ends early, or its directory is damaged (kind `bad-zip`).
        UnsafeError: it is ambiguous or uses what torch never writes (kind `unsafe-zip`).
        UnsupportedError: it is a TorchScript program, or no record is one that torch writes.
    """
    place = _Place(file, base, size)
    if size < _EOCD.size:
        place.damaged(_CUT)
    end = read(size - min(size, tail), min(size, tail))
    odd: dict[str, None] = {}
    try:
        count, start, stop = _directory(end, size, place, odd)
    except (CorruptError, UnsafeError):
        _refuse_foreign(read, size, file)
        raise
    first = size - len(end)
    directory = end[start - first : stop - first] if start >= first else read(start, stop - start)
    if count or size == _EOCD.size:  # torch ends an archive with more than that
        _require_torch(directory, count, file)
    entries = _entries(directory, count, start, place, odd)
    return _placed(entries, start, read, place)._replace(odd=tuple(odd))


def _directory(end: bytes, size: int, place: _Place, odd: dict[str, None]) -> tuple[int, int, int]:
    """Return (number of entries, start, stop) of the central directory from the end records."""
    at = len(end) - _EOCD.size
    sig, disk, cd_disk, here, count, length, start, comment = _EOCD.unpack_from(end, at)
    if sig != b"PK\5\6":
        _no_end(end, size, place)
    if comment:
        place.damaged("its end record announces a comment that is not there")
    if disk or cd_disk or here != count:
        place.unsafe("it claims to be one of several disks")
    stop = size - _EOCD.size
    locator = at - _LOCATOR.size
    if locator < 0 or end[locator : locator + 4] != b"PK\6\7":
        if count == _U16 or length == _U32 or start == _U32:
            place.damaged("its zip64 end record is missing")
    else:
        count, length, start = _zip64(end, locator, (count, length, start), size, place)
        stop = size - _ENDS
        versions = _EOCD64.unpack_from(end, locator - _EOCD64.size)[2:4]
        if versions != _END_VERSIONS:
            odd[f"the versions {versions[0]} and {versions[1]} in its zip64 end record"] = None
    if start + length != stop:
        place.unsafe(
            f"its end record places the directory at {start}..{start + length}, it ends at {stop}"
        )
    if count * _CENTRAL.size > length:
        place.damaged("its directory is shorter than its number of records needs", start, length)
    return count, start, stop


def _zip64(
    end: bytes, locator: int, plain: tuple[int, int, int], size: int, place: _Place
) -> tuple[int, int, int]:
    at = locator - _EOCD64.size
    _, disk, offset, disks = _LOCATOR.unpack_from(end, locator)
    if disk or disks != 1:
        place.unsafe("it claims to be one of several disks")
    if at < 0 or offset != size - _ENDS:
        place.unsafe(f"its zip64 locator points to {offset}, the record before it differs")
    sig, length64, _, _, disk, cd_disk, here, *real = _EOCD64.unpack_from(end, at)
    if sig != b"PK\6\6":
        place.damaged("its zip64 end record has no signature", offset, _EOCD64.size)
    count, length, start = real
    if disk or cd_disk or here != count or length64 != _EOCD64.size - 12:
        place.unsafe("its zip64 end record is not what torch writes", offset, _EOCD64.size)
    for short, wide, limit in zip(plain, real, (_U16, _U32, _U32), strict=True):
        if short not in (wide, limit):
            place.unsafe(f"its two end records disagree ({short} and {wide})")
    return count, length, start


def _no_end(end: bytes, size: int, place: _Place) -> NoReturn:
    """Tell an archive with something after it from one that was cut."""
    at = end.rfind(b"PK\5\6", 0, len(end) - _EOCD.size + 3)
    while at >= 0:
        *_, length, start, comment = _EOCD.unpack_from(end, at)
        stop = size - len(end) + at
        ends = _ENDS - _EOCD.size if end[at - _LOCATOR.size : at][:4] == b"PK\6\7" else 0
        # Tensor bytes may look like an end record; a real one points back at its directory.
        if start + length + ends == stop or (ends and _U32 in (start, length)):
            after = len(end) - at - _EOCD.size
            if comment > after:
                place.damaged(_CUT)
            if comment:
                place.unsafe(f"a comment of {after} bytes follows its end", stop, after)
            place.unsafe(f"{after} bytes follow its end", stop + _EOCD.size, after)
        at = end.rfind(b"PK\5\6", 0, at + 3)
    place.damaged(_CUT)


def _refuse_foreign(read: Read, size: int, file: str) -> None:
    """Refuse another program's archive by name, where something follows its directory.

    Its first record must be another's too: the end of a torch.save archive may be overwritten.

    Raises:
        UnsupportedError: it is one, and whole.
    """
    begins = read(0, min(size, LOCAL_HEADER.size + _HEAD_NAME))
    if begins[:4] not in (b"PK\3\4", b"PK\5\6") or any(sign in begins for sign in _OF_TORCH):
        return
    length = min(size, _EOCD.size + _U16 + _ENDS)
    tail, first = read(size - length, length), size - length
    at = tail.rfind(b"PK\5\6", 0, length - _EOCD.size + 4)
    while at >= 0:
        *_, count, nbytes, start, comment = _EOCD.unpack_from(tail, at)
        if start + nbytes == first + at and comment <= length - at - _EOCD.size:
            directory = read(start, nbytes)
            names = _names_in(directory)
            if names is not None and len(names) == count:
                _require_torch(directory, count, file)
        at = tail.rfind(b"PK\5\6", 0, at + 3)


def _require_torch(directory: bytes, count: int, file: str) -> None:
    """Refuse the archive of another program: torch reads nothing of it, so nobody is misled.

    Raises:
        UnsupportedError: it is one.
    """
    if any(sign in directory for sign in _OF_TORCH):
        return
    names = _names_in(directory)
    if names is None:
        return
    more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
    held = ", ".join(_show(name) for name in names[:_SHOWN]) or "nothing"
    raise UnsupportedError(
        f"{file} is a zip that torch.save did not write: it holds {held}{more}",
        hint="the program that wrote it reads it",
        file=file,
    )


def _names_in(directory: bytes) -> list[bytes] | None:
    """Return the names of all records of a directory; None if it is not a directory alone."""
    names, at = list[bytes](), 0
    while at + _CENTRAL.size <= len(directory):
        sig, *_, length, extra, comment, _, _, _, _ = _CENTRAL.unpack_from(directory, at)
        if sig != b"PK\1\2":
            return None
        at += _CENTRAL.size
        names.append(directory[at : at + length])
        at += length + extra + comment
    return names if at == len(directory) else None


class _Entry(NamedTuple):
    name: str
    raw_length: int
    size: int
    crc32: int
    header: int
    flags: int


@lru_cache(maxsize=4096)
def _split(raw: bytes) -> tuple[str, str] | None:
    """Return (prefix, name), or None where no careful writer makes such a name."""
    try:
        prefix, slash, name = raw.decode("utf-8").partition("/")
    except UnicodeDecodeError:
        return None
    parts = [prefix, *name.split("/")]
    if not slash or any(part in ("", ".", "..") for part in parts):
        return None
    if "\\" in prefix or "\\" in name or not (prefix + name).isprintable():
        return None
    return prefix, name


def _entries(
    data: bytes, count: int, start: int, place: _Place, odd: dict[str, None]
) -> tuple[str, list[_Entry]]:
    """Parse the central directory; every entry must be one that torch could have written."""
    entries: list[_Entry] = []
    prefix = ""
    at, stop, unpack = 0, len(data), _CENTRAL.unpack_from
    for _ in range(count):
        if at + 46 > stop:
            place.damaged("its directory ends early", start, stop)
        (
            sig, made, needed, flags, method, clock, date, crc, packed, size,
            name_length, extra, comment, disk, internal, external, header,
        ) = unpack(data, at)  # fmt: skip
        if sig != b"PK\1\2":
            place.damaged(f"a directory entry at byte {start + at} has no signature", start + at)
        raw = data[at + 46 : at + 46 + name_length]
        next_at = at + 46 + name_length + extra + comment
        if next_at > stop:
            place.damaged("its directory ends early", start, stop)
        names = _split(raw)
        if names is None:
            place.unsafe(f"the record name {_show(raw)} is not one that torch writes", start + at)
        if method:
            if b"/constants.pkl" in data:  # TorchScript compresses its source code
                raise UnsupportedError(
                    f"{place.file} is a TorchScript program, not a checkpoint",
                    hint="save the module's state_dict with torch.save",
                    file=place.file,
                )
            place.unsafe(f"the record {_show(raw)} is compressed", start + at)
        if flags not in _FLAGS:
            place.unsafe(f"the record {_show(raw)} has the flags {flags:#06x}", start + at)
        if external & _FOLDER:
            place.damaged(
                f"the record {_show(raw)} is marked as a folder, which torch does not read",
                start + at,
                46,
            )
        if needed > _VERSION:
            place.damaged(
                f"the record {_show(raw)} needs version {needed} of the zip format", start + at, 46
            )
        if made or needed or clock or date or internal or external:
            odd[
                f"versions {made} and {needed}, time {clock} and {date}, attributes {internal} and"
                f" {external} of the record {_show(raw)}"
            ] = None
        if comment or disk:
            place.unsafe(f"the record {_show(raw)} has a comment or another disk", start + at)
        if extra:
            field = data[at + 46 + name_length : next_at]
            packed, size, header = _wide(field, packed, size, header, start + at, place)
        elif packed == _U32 or size == _U32 or header == _U32:
            place.damaged("a directory entry lacks its zip64 sizes", start + at)
        if packed != size:
            place.unsafe(f"the record {_show(raw)} has two different sizes", start + at)
        if not entries:
            prefix = names[0]
        elif names[0] != prefix:
            place.unsafe(f"its records lie in two folders, {prefix!r} and {names[0]!r}", start + at)
        entries.append(_Entry(names[1], name_length, size, crc, header, flags))
        at = next_at
    if at != stop:
        place.unsafe("its directory holds more than its records", start + at, stop - at)
    return prefix, entries


def _wide(
    field: bytes, packed: int, size: int, header: int, at: int, place: _Place
) -> tuple[int, int, int]:
    """Return the sizes and the offset that a zip64 extra field gives; no other field is taken."""
    narrow = [size, packed, header]
    wanted = [i for i, value in enumerate(narrow) if value == _U32]
    if len(field) != 4 + 8 * len(wanted) or field[:2] != b"\1\0" or not wanted:
        place.unsafe("a directory entry has an extra field that torch does not write", at)
    if int.from_bytes(field[2:4], "little") != 8 * len(wanted):
        place.unsafe("a directory entry's zip64 field has the wrong length", at)
    for slot, index in enumerate(wanted):
        narrow[index] = int.from_bytes(field[4 + 8 * slot : 12 + 8 * slot], "little")
    return narrow[1], narrow[0], narrow[2]


def _placed(listed: tuple[str, list[_Entry]], start: int, read: Read, place: _Place) -> Archive:
    """Find each record's bytes from where the next one begins, and check that nothing is between.

    A record's data ends at the next header less its data descriptor. The same place follows
    forwards from its own header and the writer's alignment; both must agree.
    """
    prefix, entries = listed
    members: dict[str, Member] = {}
    alignment = 64
    base = place.base
    if entries and entries[0].header:
        place.unsafe(f"{entries[0].header} bytes stand before its first record", 0)
    if not entries:
        if start:
            place.unsafe(f"{start} bytes stand before its empty directory", 0)
        return Archive(prefix, members, base, place.size, start)
    bounds = [entry.header for entry in entries[1:]]
    bounds.append(start)
    for entry, bound in zip(entries, bounds, strict=True):
        name, raw_length, size, crc, header, flags = entry
        data = bound - descriptor_length(size, header, flags) - size
        least = header + 30 + raw_length
        if data < least:
            place.unsafe(f"the record {name!r} overlaps what stands before it", header)
        if data != least:
            wide = 0
            if size >= _U32 or header >= _U32:
                wide = 4 + (16 if size >= _U32 else 0) + (8 if header >= _U32 else 0)
            gap = data - least - 4 - wide
            if gap < 0 or gap >= alignment or data % alignment:
                found = next((a for a in _ALIGNMENTS if 0 <= gap < a and data % a == 0), 0)
                if found:
                    alignment = found
                elif _local(read, entry, place)[1] != data:
                    place.unsafe(f"bytes that belong to nothing surround {name!r}", header)
        members[name] = Member(
            name, base + data, size, crc if crc or not size else None, header, flags
        )
    if len(members) != len(entries):
        place.unsafe("two of its records have the same name", start)
    return Archive(prefix, members, base, place.size, start)


def descriptor_length(size: int, header: int, flags: int) -> int:
    """Return the length of a record's data descriptor; miniz widens it with size or offset."""
    if not flags & _DESCRIPTOR_FLAG:
        return 0
    return 24 if size >= _U32 or header >= _U32 else 16


def _local(read: Read, entry: _Entry, place: _Place) -> tuple[bytes, int]:
    """Return the local header of a record with its name and extra, and where its data begins."""
    if entry.header + 30 > place.size:
        place.damaged("a record's header lies outside the file", entry.header)
    head = read(entry.header, 30)
    if head[:4] != b"PK\3\4":
        place.damaged(f"the header of {entry.name!r} has no signature", entry.header, 30)
    *_, name_length, extra = LOCAL_HEADER.unpack(head)
    length = 30 + name_length + extra
    if entry.header + length > place.size:
        place.damaged("a record's header ends outside the file", entry.header)
    return read(entry.header, length), entry.header + length


def _show(raw: bytes) -> str:
    text = ascii(raw.decode("utf-8", "replace"))
    return text if len(text) <= 80 else text[:77] + "...'"


def serialization_id(archive: Archive) -> str | None:
    """Return digits 21 to 40 of the serialization id that the directory's CRCs give.

    It is torch's running combination of the CRC-32s of all records before the id's own, so equal
    text means that no CRC was edited. None where the archive carries no id.
    """
    crcs: list[int] = []
    for name, member in archive.members.items():
        if name == ".data/serialization_id":
            return f"{combined_crcs(crcs):020d}"
        if member.size:  # torch counts a record when it writes bytes
            crcs.append(member.crc32 or 0)
    return None


def combined_crcs(crcs: Iterable[int]) -> int:
    """Return torch's running combination of CRC-32s (`at::hash_combine`), 64 bits."""
    seed = 0
    for crc in crcs:
        seed ^= (crc + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & 0xFFFFFFFFFFFFFFFF
    return seed
