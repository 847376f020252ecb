"""One checkpoint, or one root, whose files lie in several places: on the disks of several nodes.

The places hold the same relative names. A file of one place is simply there. A file of several
places is one file if all its copies are equal: their sizes are compared when they are listed, and
every byte that is read is compared with the other copies'. No copy is preferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ftckpt.errors import CorruptError, IncompleteError, NotFoundError, UsageError
from ftckpt.own_files import FOLDER

from .readonly import ReadOnlyStore
from .store import Entry, EntryKind, Reader, Store, Traits, Usage

if TYPE_CHECKING:
    from ftckpt.extents import Extent

_CHUNK = 1 << 20  # bytes of another copy that are held while they are compared


class GatheredStore(ReadOnlyStore):
    """A read-only store over several, which are listed as one.

    `places` are opened at the directories with the same meaning. The URL is the first one's.
    """

    def __init__(self, places: Sequence[Store]) -> None:
        require_apart(places)
        self.url = places[0].url
        self.options = places[0].options
        self.refusal = f"{self.url} is read together with other places, and cannot be written so"
        local = all(place.traits.local for place in places)
        self.traits = Traits(
            local=False,  # no single path has all its files
            conditional_put=False,
            gap=0 if local else max(place.traits.gap for place in places),
            parallel=max(place.traits.parallel for place in places),
        )
        self._places = tuple(places)
        self._holders: dict[str, tuple[Store, ...]] = {}
        self._differ: dict[str, str] = {}

    def parts(self) -> tuple[Store, ...]:
        """Return the stores that it is made of."""
        return self._places

    def stat(self, path: str) -> Entry:
        """Return the entry of one key; a prefix of other keys is a DIRECTORY."""
        found = []
        for place in self._places:
            try:
                found.append((place, place.stat(path)))
            except NotFoundError:
                continue
        if not found:
            raise NotFoundError(f"none of the places has {path or self.url}", file=path)
        return self._one(path, found)

    def children(self, path: str = "") -> list[Entry]:
        """Return the entries directly below `path` in any place, sorted by path."""
        return self._merged([(p, e) for p in self._places for e in _children(p, path)], path)

    def walk(self, path: str = "") -> list[Entry]:
        """Return every FILE and SPECIAL below `path` in any place, sorted by path.

        Raises:
            NotFoundError: as `Store.walk`.
            IncompleteError: a place has nothing of the checkpoint that `path` is part of
                (`absent-place`); it may belong to another run, or be behind.
        """
        listed = [(place, _walk(place, path)) for place in self._places]
        merged = self._merged([(p, e) for p, entries in listed for e in entries or ()], path)
        whole, _, _ = path.partition("/")
        for place, entries in listed:
            if entries is None and not _holds(place, whole):
                has = next(p for p, entries in listed if entries is not None)
                raise IncompleteError(
                    f"{whole} is in {has.url} and not in {place.url}",
                    hint="name only the places that hold files of this checkpoint",
                    kind="absent-place",
                    file=whole,
                )
        return merged

    def open(self, path: str) -> Reader:
        """Open one object for ranged reads; what is read is compared with its other copies.

        Raises:
            CorruptError: two copies differ (`copies-differ`); also while reading.
        """
        if path not in self._holders:
            self.stat(path)
        if path in self._differ:
            raise copies_differ(path, self._differ[path])
        holders = self._holders.get(path, self._places[:1])
        if len(holders) == 1:
            return holders[0].open(path)
        with ExitStack() as stack:
            readers = [stack.enter_context(place.open(path)) for place in holders]
            stack.pop_all()
        return _ComparingReader(path, holders, readers)

    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order."""
        result: dict[int, bytes] = {}
        alone: dict[int, list[int]] = {}
        for number, extent in enumerate(extents):
            holders = self._holders.get(extent.file, ())
            if len(holders) == 1:
                alone.setdefault(self._places.index(holders[0]), []).append(number)
                continue
            with self.open(extent.file) as reader:
                result[number] = reader.read(extent.offset, extent.length)
        for place, numbers in alone.items():
            read = self._places[place].read_many([extents[n] for n in numbers])
            result.update(zip(numbers, read, strict=True))
        return [result[number] for number in range(len(extents))]

    def usage(self) -> Usage:
        """Return the use of all places together."""
        used = [place.usage() for place in self._places]
        return Usage(sum(u.requests for u in used), sum(u.bytes_read for u in used))

    def describe(self, path: str = "") -> str:
        """Return the URL of a key in the first place that holds it."""
        holders = self._holders.get(path)
        return (holders or self._places)[0].describe(path) if path else self.url

    def identity(self, path: str = "") -> str:
        """Return a key's unique identity: the one in the first place that holds it."""
        return (self._holders.get(path) or self._places)[0].identity(path)

    def places_of(self, path: str) -> tuple[str, ...]:
        """Return the URLs of the places that hold a listed file."""
        return tuple(place.url for place in self._holders.get(path, ()))

    def _merged(self, found: Sequence[tuple[Store, Entry]], path: str) -> list[Entry]:
        if not found and not any(_holds(place, path) for place in self._places):
            raise NotFoundError(f"nothing lies below {self.describe(path)}", file=path)
        by_path: dict[str, list[tuple[Store, Entry]]] = {}
        for place, entry in found:
            by_path.setdefault(entry.path, []).append((place, entry))
        return [self._one(name, by_path[name]) for name in sorted(by_path)]

    def _one(self, path: str, found: Sequence[tuple[Store, Entry]]) -> Entry:
        """Return the entry of one name, and remember which places hold it."""
        place, entry = next(
            ((p, e) for p, e in found if e.kind is EntryKind.SPECIAL),
            found[0],
        )
        if entry.kind is EntryKind.DIRECTORY and all(e.kind is entry.kind for _, e in found):
            return entry
        if FOLDER in path.split("/"):  # each place has its own of those
            found = found[:1]
            place, entry = found[0]
        self._holders[path] = tuple(p for p, _ in found)
        if entry.kind is EntryKind.SPECIAL:
            return entry
        for other, copy in found:
            if (copy.kind, copy.size) != (entry.kind, entry.size):
                told = f"{_shown(entry)} in {place.url} and {_shown(copy)} in {other.url}"
                self._differ[path] = told
                return entry._replace(kind=EntryKind.FILE, differs=told)
        self._differ.pop(path, None)
        return entry._replace(copies=len(found) - 1)


class _ComparingReader(Reader):
    """The copies of one object; every range that is read is read of each and compared."""

    def __init__(self, path: str, places: Sequence[Store], readers: Sequence[Reader]) -> None:
        self._path = path
        self._places = places
        self._readers = readers

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`."""
        data = self._readers[0].read(offset, length)
        self._compare(offset, memoryview(data))
        return data

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`."""
        view = view.cast("B")
        self._readers[0].readinto(offset, view)
        self._compare(offset, view)

    def close(self) -> None:
        """Release all copies."""
        for reader in self._readers:
            reader.close()

    def _compare(self, offset: int, ours: memoryview) -> None:
        """Raise CorruptError (`copies-differ`) with the first byte that differs."""
        for place, reader in zip(self._places[1:], self._readers[1:], strict=True):
            for start in range(0, len(ours), _CHUNK):
                part = ours[start : start + _CHUNK]
                theirs = reader.read(offset + start, len(part))
                if part == theirs:
                    continue
                at = next(n for n, (a, b) in enumerate(zip(part, theirs, strict=True)) if a != b)
                first = offset + start + at
                told = f"byte {first} in {self._places[0].url} and in {place.url}"
                raise copies_differ(self._path, told, first)


def copies_differ(path: str, told: str, offset: int | None = None) -> CorruptError:
    """Return the error on a file whose copies are not one file; `told` says where they differ."""
    return CorruptError(
        f"the copies of {path} differ: {told}",
        hint="find out which copy is right, and leave the other place out",
        kind="copies-differ",
        file=path,
        offset=offset,
    )


def require_apart(places: Sequence[Store]) -> None:
    """Refuse a place that is given twice, and one that lies in another.

    Raises:
        UsageError: which.
    """
    import os

    known: list[tuple[str, str]] = []
    for place in places:
        local = place.local_path()
        where = place.identity() if local is None else os.path.realpath(local)
        for url, other in known:
            if where == other:
                raise UsageError(f"{place.url} is the same place as {url}")
            shorter, longer = sorted((where, other), key=len)
            if longer.startswith(shorter.rstrip("/") + "/"):
                raise UsageError(f"of {url} and {place.url}, one lies in the other")
        known.append((place.url, where))


def _children(place: Store, path: str) -> list[Entry]:
    try:
        return place.children(path)
    except NotFoundError:
        return []


def _walk(place: Store, path: str) -> list[Entry] | None:
    try:
        return place.walk(path)
    except NotFoundError:
        return None


def _holds(place: Store, path: str) -> bool:
    try:
        place.stat(path)
    except NotFoundError:
        return False
    return True


def _shown(entry: Entry) -> str:
    return "a directory" if entry.kind is EntryKind.DIRECTORY else f"{entry.size} bytes"
