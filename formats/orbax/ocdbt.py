"""Read an OCDBT database: its manifest, and every node of the newest version's B-tree.

    manifest.ocdbt -> root node -> nodes, one level below the other -> values, inline or elsewhere

A manifest or node is a 4-byte big-endian magic, its 8-byte little-endian length, the varints
version and compression (0 none, 1 zstd), the body, and the little-endian CRC-32C of all before it.
Every one is checked when it is read. A level is read at once, and no node twice: the height falls
by one from level to level, and two references to one node are refused.

Source: tensorstore, `kvstore/ocdbt/index.rst` and `kvstore/ocdbt/format/*.cc`.

CRC-32C (Castagnoli), reflected polynomial 0x82F63B78, as RFC 3720 describes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import NamedTuple, NoReturn

from ftckpt.errors import (
    CorruptError,
    NewerWriterError,
    NoResourceError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.extents import Extent
from ftckpt.storage.decompress import ZSTD, undo
from ftckpt.storage.source import Source, safe_name
from ftckpt.workers.budget import budget

from .names import MANIFEST

_POLYNOMIAL = 0x82F63B78
_LANES = 1 << 10
_LONG = 1 << 17  # from here on many bytes at a time are worth numpy


@cache
def _table() -> tuple[int, ...]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return tuple(found)


def crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C of some bytes."""
    if len(data) < _LONG:
        return _update(0xFFFFFFFF, data) ^ 0xFFFFFFFF
    return _of_lanes(memoryview(data)) ^ 0xFFFFFFFF


def _update(crc: int, data: bytes | memoryview) -> int:
    table = _table()
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc


def _of_lanes(data: memoryview) -> int:
    """Return the register after long data: of equal parts side by side, then joined."""
    import numpy as np

    each = len(data) // _LANES
    table = np.array(_table(), np.uint32)
    columns = np.frombuffer(data[: each * _LANES], np.uint8).reshape(_LANES, each)
    registers = np.zeros(_LANES, np.uint32)
    for column in range(each):
        registers = table[(registers ^ columns[:, column]) & 255] ^ registers >> 8
    # The register is linear: what zeros make of it is known from what they make of each bit.
    carried = _after_zeros(each)
    crc = 0xFFFFFFFF
    for register in registers.tolist():
        crc = _applied(carried, crc) ^ register
    return _update(crc, data[each * _LANES :])


def _after_zeros(count: int) -> list[int]:
    """Return what each bit of a register becomes after `count` bytes of zero, by squaring."""
    step = [_update(1 << bit, b"\0") for bit in range(32)]
    found = [1 << bit for bit in range(32)]
    while count:
        if count & 1:
            found = [_applied(step, one) for one in found]
        step = [_applied(step, one) for one in step]
        count >>= 1
    return found


def _applied(columns: list[int], value: int) -> int:
    found = 0
    for bit in range(32):
        if value >> bit & 1:
            found ^= columns[bit]
    return found


_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_HEADER, _FOOTER = 12, 4
_LEAST = _HEADER + 2 + _FOOTER
_MOST_ENTRIES = 1 << 20
_MOST_KEY = _MOST_PATH = 65_535
_MOST_INLINE = 1 << 20
_U64 = (1 << 64) - 1
_GROWTH = 8  # bytes of memory for a byte of a decoded node, as a bound
_ENTRY = 512  # and for an entry of it, beside the key: keys and paths share prefixes in a node
_BATCH = 1024  # nodes read at once, as a bound


class Value(NamedTuple):
    """A value of the database.

    Attributes:
        extent: its bytes; of an inline value the node that holds it.
        inline: the bytes of an inline value.
    """

    extent: Extent
    inline: bytes | None = None


@dataclass
class Database:
    """All that a database says.

    Attributes:
        values: by key.
        nodes: the place of the manifest and of every node of the newest version.
        older: the roots of the versions before it that the manifest names; they are not read.
    """

    values: dict[str, Value] = field(default_factory=dict)
    nodes: list[Extent] = field(default_factory=list)
    older: list[Extent] = field(default_factory=list)


class _Child(NamedTuple):
    extent: Extent
    base: bytes  # transitive path of what it refers to
    height: int
    prefix: bytes  # of all its keys


def read_database(source: Source, folder: str) -> Database:
    """Read the newest version of the database in a folder ("" or ending in a slash).

    Raises:
        CorruptError: a node is missing, short, damaged (`bad-crc`), or contradicts itself.
        UnsafeError: a name climbs, or a node unfolds to more than may be held.
        UnsupportedError: a version, a compression or a kind of manifest that is not known.
    """
    name = folder + MANIFEST
    place = Extent(name, 0, source.size(name))
    room = _Room()
    found = Database(nodes=[place])
    level = _roots(_body(source.read(name), place, _MANIFEST_MAGIC, room), folder, found.older)
    seen: set[tuple[str, int]] = set()
    while level:
        below: list[_Child] = []
        for start in range(0, len(level), _BATCH):
            batch = level[start : start + _BATCH]
            for child in batch:
                _require_inside(source, child.extent, seen)
            raws = source.read_many([child.extent for child in batch])
            for child, raw in zip(batch, raws, strict=True):
                found.nodes.append(child.extent)
                body = _body(raw, child.extent, _NODE_MAGIC, room)
                below += _node(body, child, folder, found.values)
        level = below
    return found


def _require_inside(source: Source, place: Extent, seen: set[tuple[str, int]]) -> None:
    if (place.file, place.offset) in seen:
        raise CorruptError(
            f"two nodes refer to one at {place.offset} of {place.file}",
            kind="bad-metadata", file=place.file, offset=place.offset, length=place.length,
        )  # fmt: skip
    seen.add((place.file, place.offset))
    size = source.size(place.file)
    if place.end > size:
        raise CorruptError(
            f"{place.file} ends at byte {size}, and a node goes to {place.end}",
            kind="truncated-file", file=place.file, offset=place.offset, length=place.length,
        )  # fmt: skip
    if place.length > budget() // 2:
        raise _too_large(place.file)


def _too_large(file: str) -> NoResourceError:
    return NoResourceError(
        f"the nodes of {file} need more memory than {budget() >> 20} MiB",
        hint="raise --max-memory",
        file=file,
    )


class _Room:
    """Bounds what all nodes together unfold to, in bytes of memory."""

    def __init__(self) -> None:
        self.left = budget()

    def unfold(self, body: bytes, file: str) -> bytes:
        """Return a body that zstd compressed."""
        limit = max(0, self.left) // _GROWTH + 1
        parts = b"".join(undo((ZSTD,), [body], limit=limit, file=file))
        self.take(len(parts) * _GROWTH, file)
        return parts

    def take(self, nbytes: int, file: str) -> None:
        """Count bytes that are held."""
        self.left -= nbytes
        if self.left < 0:
            raise _too_large(file)


def _body(raw: bytes, place: Extent, magic: int, room: _Room) -> _Cursor:
    """Return the body of a manifest or node, its CRC checked and its compression undone."""
    file, offset, length = place

    def damaged(said: str, kind: str) -> NoReturn:
        raise CorruptError(
            f"the {'node' if magic == _NODE_MAGIC else 'manifest'} at {offset} of {file} {said}",
            kind=kind, file=file, offset=offset, length=length,
        )  # fmt: skip

    if len(raw) < _LEAST:
        damaged(f"has {len(raw)} bytes", "truncated-file")
    held = int.from_bytes(raw[4:_HEADER], "little")
    if int.from_bytes(raw[:4], "big") != magic:
        damaged("does not begin with its magic number", "bad-metadata")
    if held != len(raw):
        kind = "truncated-file" if held > len(raw) else "trailing-bytes"
        damaged(f"says that it has {held} bytes and has {len(raw)}", kind)
    if crc32c(memoryview(raw)[:-_FOOTER]) != int.from_bytes(raw[-_FOOTER:], "little"):
        damaged("does not match its CRC-32C", "bad-crc")
    head = _Cursor(raw[_HEADER:-_FOOTER], file, room)
    version, compression = head.varint(), head.varint()
    if version or compression > 1:
        said = f"version {version}" if version else f"compression {compression}"
        raise UnsupportedError(f"{file} has OCDBT's {said}, which is not known", file=file)
    rest = head.rest()
    if compression:
        return _Cursor(room.unfold(rest, file), file, room)
    room.take(len(rest) * _GROWTH, file)
    return _Cursor(rest, file, room)


class _Cursor:
    """The numbers of a body, in order."""

    def __init__(self, data: bytes, file: str, room: _Room) -> None:
        self._data = data
        self._at = 0
        self._room = room
        self.file = file

    def hold(self, nbytes: int) -> None:
        """Count bytes that an entry unfolds to, before it does."""
        self._room.take(_ENTRY + nbytes, self.file)

    def fail(self, said: str) -> NoReturn:
        raise CorruptError(f"a node of {self.file} {said}", kind="bad-metadata", file=self.file)

    def take(self, length: int) -> bytes:
        data = self._data[self._at : self._at + length]
        if len(data) != length:
            self.fail("ends early")
        self._at += length
        return data

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self, most: int = _U64) -> int:
        return self.varints(1, most)[0]

    def varints(self, count: int, most: int = _U64) -> list[int]:
        data, at = self._data, self._at
        if count > len(data) - at:
            self.fail("ends early")
        found = []
        try:
            for _ in range(count):
                value = data[at]
                at += 1
                if value & 128:
                    value &= 127
                    shift = 7
                    while True:
                        more = data[at]
                        at += 1
                        value |= (more & 127) << shift
                        shift += 7
                        if not more & 128:
                            break
                        if shift > 63:
                            self.fail("holds a number beyond 64 bits")
                if value > most:
                    self.fail(f"holds {value} where {most} is most")
                found.append(value)
        except IndexError:
            self.fail("ends early")
        self._at = at
        return found

    def end(self) -> None:
        if self._at != len(self._data):
            self.fail(f"holds {len(self._data) - self._at} bytes after its end")


def _files(cursor: _Cursor, base: bytes) -> list[tuple[bytes, bytes]]:
    """Return (transitive path, whole path) of each data file of a table."""
    count = cursor.varint(_MOST_ENTRIES)
    prefixes = [0, *cursor.varints(max(0, count - 1), _MOST_PATH)][:count]
    suffixes = cursor.varints(count, _MOST_PATH)
    bases = cursor.varints(count, _MOST_PATH)
    found: list[tuple[bytes, bytes]] = []
    path, last = b"", 0
    for prefix, suffix, own in zip(prefixes, suffixes, bases, strict=True):
        if prefix > len(path) or own > prefix + suffix:
            cursor.fail("has a table of files that contradicts itself")
        if prefix > min(last, own) and own != last:
            cursor.fail("has a table of files that contradicts itself")
        path = path[:prefix] + cursor.take(suffix)
        if len(base) + len(path) > _MOST_PATH:
            cursor.fail("names a file of more than 65535 bytes")
        last = own
        cursor.hold(2 * (len(base) + len(path)))
        found.append((base + path[:own], base + path))
    return found


def _path(cursor: _Cursor, folder: str, path: bytes) -> str:
    try:
        return safe_name(folder + path.decode(), named_by=cursor.file)
    except UnicodeDecodeError:
        raise UnsafeError(
            f"{cursor.file} names a file that is not UTF-8", kind="unsafe-path", file=cursor.file
        ) from None


def _places(
    cursor: _Cursor, files: list[tuple[bytes, bytes]], count: int
) -> tuple[list[int], list[int]]:
    """Return numbers of files, and offsets."""
    return cursor.varints(count, max(0, len(files) - 1)), cursor.varints(count)


def _roots(cursor: _Cursor, folder: str, earlier: list[Extent]) -> list[_Child]:
    """Return the root node of the newest version, none of an empty database; add the others."""
    cursor.take(16)  # uuid
    if kind := cursor.byte():
        raise UnsupportedError(
            f"{cursor.file} is of kind {kind}: manifests with numbers are not read",
            file=cursor.file,
        )
    cursor.varints(2, (1 << 32) - 1)  # sizes that matter to writers
    arity = cursor.byte()
    if not 1 <= arity <= 16:
        cursor.fail(f"has a version tree of arity 2**{arity}")
    if method := cursor.varint():
        if method != 1:
            raise UnsupportedError(
                f"{cursor.file} has OCDBT's compression {method}, which is not known",
                file=cursor.file,
            )
        cursor.take(4)  # level
    files = _files(cursor, b"")
    count = cursor.varint(1 << arity)
    if not count:
        cursor.fail("has no version")
    generations = cursor.varints(count)
    if not generations[0] or any(a >= b for a, b in pairwise(generations)):
        cursor.fail("has versions that are not in order")
    heights = cursor.take(count)
    numbers, offsets = cursor.varints(count), cursor.varints(count)
    lengths = cursor.varints(count)
    cursor.varints(3 * count)  # statistics
    cursor.take(8 * count)  # times
    older = cursor.varint(64)
    cursor.varints(older)
    for number in cursor.varints(older):
        if number >= len(files):
            cursor.fail("refers to a file that it does not name")
    cursor.varints(3 * older)
    cursor.take(9 * older)
    cursor.end()
    roots: list[_Child | None] = []
    for number, offset, length, height in zip(numbers, offsets, lengths, heights, strict=True):
        if offset == length == _U64:
            roots.append(None)
            continue
        if number >= len(files):
            cursor.fail("refers to a file that it does not name")
        base, path = files[number]
        roots.append(_Child(Extent(_path(cursor, folder, path), offset, length), base, height, b""))
    earlier += [root.extent for root in roots[:-1] if root is not None]
    return [root for root in roots[-1:] if root is not None]


def _node(cursor: _Cursor, child: _Child, folder: str, values: dict[str, Value]) -> list[_Child]:
    """Put the values of a leaf into `values`, or return the children of another node."""
    height = cursor.byte()
    if height != child.height:
        cursor.fail(f"has height {height} where its parent says {child.height}")
    files = _files(cursor, child.base)
    count = cursor.varint(_MOST_ENTRIES)
    if not count:
        cursor.fail("is empty")
    prefixes = [0, *cursor.varints(count - 1, _MOST_KEY)]
    suffixes = cursor.varints(count, _MOST_KEY)
    shared = cursor.varints(count, _MOST_KEY) if height else []
    keys = _keys(cursor, prefixes, suffixes)
    paths: dict[int, str] = {}
    if height:
        numbers, offsets = _places(cursor, files, count)
        lengths = cursor.varints(count)
        cursor.varints(3 * count)  # statistics
        cursor.end()
        below = []
        for n, key in enumerate(keys):
            if shared[n] > len(key):
                cursor.fail("shares a longer prefix than its key")
            if not files:
                cursor.fail("names no file")
            number = numbers[n]
            if number not in paths:
                paths[number] = _path(cursor, folder, files[number][1])
            cursor.hold(len(child.prefix) + shared[n])
            place = Extent(paths[number], offsets[n], lengths[n])
            prefix = child.prefix + key[: shared[n]]
            below.append(_Child(place, files[number][0], height - 1, prefix))
        return below
    lengths = cursor.varints(count)
    kinds = cursor.take(count)
    if max(kinds) > 1:
        raise NewerWriterError.of(  # its CRC matches
            f"the kind of a value in {cursor.file}", expected="0 or 1", found=str(max(kinds)),
            file=cursor.file,
        )  # fmt: skip
    outside = sum(kinds)
    if outside and not files:
        cursor.fail("names no file")
    numbers, offsets = _places(cursor, files, outside)
    at = 0
    for key, length, kind in zip(keys, lengths, kinds, strict=True):
        if kind:
            number = numbers[at]
            if number not in paths:
                paths[number] = _path(cursor, folder, files[number][1])
            value = Value(Extent(paths[number], offsets[at], length))
            at += 1
        else:
            if length > _MOST_INLINE:
                cursor.fail("holds an inline value beyond a MiB")
            value = Value(child.extent, cursor.take(length))
        cursor.hold(len(child.prefix) + len(key))
        name = _name(cursor, child.prefix + key)
        if name in values:
            cursor.fail(f"holds the key {name!r} twice")
        values[name] = value
    cursor.end()
    return []


def _keys(cursor: _Cursor, prefixes: list[int], suffixes: list[int]) -> list[bytes]:
    found: list[bytes] = []
    last = b""
    for prefix, suffix in zip(prefixes, suffixes, strict=True):
        if prefix > len(last) or prefix + suffix > _MOST_KEY:
            cursor.fail("has a key that contradicts itself")
        cursor.hold(prefix + suffix)
        key = last[:prefix] + cursor.take(suffix)
        if found and key <= last:
            cursor.fail("has keys that are not in order")
        found.append(key)
        last = key
    return found


def _name(cursor: _Cursor, key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        cursor.fail("has a key that is not UTF-8")
