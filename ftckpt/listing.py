"""What recognition looks at: one level of names of a directory, or one file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from .errors import CorruptError, NotFoundError, UnsafeError
from .registry import Listing, listing_of
from .roots import join
from .store import Entry, EntryKind, Store


def listing_of_directory(store: Store, path: str) -> Listing:
    """List one level of a directory; deeper levels are listed when a format asks.

    A local listing costs a call a file for more than the names, and recognition looks at few of
    them, so there each is asked about when it is looked at.
    """
    files: Mapping[str, Entry]
    if store.traits.local:
        names = store.names(path)
        directories: frozenset[str] = frozenset()
        if EntryKind.DIRECTORY in names.values():  # rarely, and looking is quick
            directories = frozenset(n for n, kind in names.items() if kind is EntryKind.DIRECTORY)
        for name in directories:
            del names[name]
        files = _Asked(store, path, names)
    else:
        files, directories = listing_of(store.children(path), path)

    @cache
    def inside(name: str) -> Listing:
        return listing_of_directory(store, join(path, name))

    return Listing(files, directories, lambda name, n: _head(store, files.get(name), n), inside)


class _Asked(Mapping[str, Entry]):
    """Files by name; the store is asked about one when it is looked at."""

    def __init__(self, store: Store, path: str, names: Mapping[str, EntryKind]) -> None:
        self._store = store
        self._path = path
        self._names = names
        self._known: dict[str, Entry] = {}

    def __getitem__(self, name: str) -> Entry:
        if name not in self._names:
            raise KeyError(name)
        known = self._known.get(name)
        if known is None:
            path = join(self._path, name)
            try:
                known = self._store.stat(path)
            except NotFoundError:  # removed since it was listed
                known = Entry(path, 0, None, EntryKind.SPECIAL)
            self._known[name] = known
        return known

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def listing_of_file(store: Store, entry: Entry) -> Listing:
    """Return the listing of a place that is one file."""
    name = entry.path.rpartition("/")[2]

    def inside(directory: str) -> Listing:
        raise KeyError(directory)

    return Listing(
        {name: entry}, frozenset(), lambda _, n: _head(store, entry, n), inside, single=name
    )


def _head(store: Store, entry: Entry | None, length: int) -> bytes:
    """Return up to `length` first bytes; nothing of what is no regular file or has shrunk."""
    if entry is None or entry.kind is not EntryKind.FILE or entry.archived:
        return b""
    try:
        return store.read(entry.path, 0, min(length, entry.size))
    except (CorruptError, UnsafeError):
        return b""
