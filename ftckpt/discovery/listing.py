"""The listing for formats to recognise: one level of a directory, or one file."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property

from ftckpt.errors import CorruptError, NotFoundError, UnsafeError
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, EntryKind, Store, is_shadow, join

from .recognise import Listing, listing_of

# A larger local directory is listed only if all its names are needed: a format with a commit marker
# looks up that name and a few others, and ten thousand checkpoints of two thousand files each have
# twenty million.
FEW = 128


def listing_of_directory(store: Store, path: str) -> Listing:
    """List one level of a directory; deeper levels are listed when a format needs them.

    A local listing with sizes costs one call per file, and recognition needs few of them, so each
    local file is looked up on demand.
    """
    if not store.traits.local:
        return _listing(store, path, *listing_of(store.children(path), path))
    names = store.names(path, FEW + 1)
    is_large = len(names) > FEW
    listed = _named(store, path, names)
    if not is_large:
        return listed
    large = _Large(store, path)
    return _listing(store, path, _LargeFiles(large), _LargeDirectories(large), some=listed)


def _listing(
    store: Store,
    path: str,
    files: Mapping[str, Entry],
    directories: Collection[str],
    some: Listing | None = None,
) -> Listing:
    @cache
    def inside(name: str) -> Listing:
        return listing_of_directory(store, join(path, name))

    def head(name: str, length: int) -> bytes:
        return _head(store, files.get(name), length)

    return Listing(files, directories, head, inside, some=some, called=_own_name(store, path))


def _own_name(store: Store, path: str) -> str:
    local = store.local_path(path)
    where = path or store.describe(path) if local is None else os.path.abspath(local)
    return where.rstrip("/").rpartition("/")[2]


def listing_of_source(source: Source) -> Listing:
    """Return the listing of files that are listed already; every level of it is known."""
    return _below(source, "", list(source.entries))


def _below(source: Source, folder: str, names: Sequence[str]) -> Listing:
    files: dict[str, Entry] = {}
    deeper: dict[str, list[str]] = {}
    for name in names:
        first, slash, rest = name.partition("/")
        if slash:
            deeper.setdefault(first, []).append(rest)
        else:
            files[name] = source.entries[folder + name]

    @cache
    def inside(name: str) -> Listing:
        return _below(source, f"{folder}{name}/", deeper[name])

    def head(name: str, length: int) -> bytes:
        entry = files.get(name)
        if entry is None or entry.kind is not EntryKind.FILE or entry.archived:
            return b""
        try:
            return source.read(folder + name, 0, min(length, entry.size))
        except (CorruptError, UnsafeError):
            return b""

    called = folder[:-1].rpartition("/")[2] or _own_name(source.store, source.base)
    return Listing(files, frozenset(deeper), head, inside, called=called)


def _named(store: Store, path: str, names: dict[str, EntryKind]) -> Listing:
    """Return the listing of a local directory with these names, which it keeps."""
    directories: frozenset[str] = frozenset()
    if EntryKind.DIRECTORY in names.values():  # rare, and the test is quick
        directories = frozenset(n for n, kind in names.items() if kind is EntryKind.DIRECTORY)
    for name in [n for n in names if n in directories or is_shadow(n)]:
        del names[name]
    return _listing(store, path, _Asked(store, path, names), directories)


class _Asked(Mapping[str, Entry]):
    """Files by name, looked up on demand."""

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


class _Large:
    """A large local directory: single names are looked up; only a request for all lists it."""

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path
        self.at = cache(self._at)

    @cached_property
    def whole(self) -> Listing:
        """All names, listed once."""
        return _named(self._store, self._path, self._store.names(self._path))

    @property
    def is_listed(self) -> bool:
        """Whether all names are listed; answers must then agree with the list."""
        return "whole" in self.__dict__

    def _at(self, name: str) -> Entry | None:
        """Return the entry of a name; None if it does not or cannot exist."""
        if "/" in name or name in ("", ".", ".."):
            return None
        try:
            return self._store.stat(join(self._path, name))
        except (NotFoundError, UnsafeError):
            return None


class _LargeFiles(Mapping[str, Entry]):
    """The files of a large directory."""

    def __init__(self, large: _Large) -> None:
        self._large = large

    def __getitem__(self, name: str) -> Entry:
        if self._large.is_listed:
            return self._large.whole.files[name]
        found = self._large.at(name)
        if found is None or found.kind is EntryKind.DIRECTORY:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._large.whole.files)

    def __len__(self) -> int:
        return len(self._large.whole.files)


class _LargeDirectories(Collection[str]):
    """The names of the directories of a large directory."""

    def __init__(self, large: _Large) -> None:
        self._large = large

    def __contains__(self, name: object) -> bool:
        if self._large.is_listed:
            return name in self._large.whole.directories
        found = self._large.at(str(name))
        return found is not None and found.kind is EntryKind.DIRECTORY

    def __iter__(self) -> Iterator[str]:
        return iter(self._large.whole.directories)

    def __len__(self) -> int:
        return len(self._large.whole.directories)


def listing_of_file(store: Store, entry: Entry) -> Listing:
    """Return the listing of a place that is one file."""
    name = entry.path.rpartition("/")[2]

    def inside(directory: str) -> Listing:
        raise KeyError(directory)

    def beside(other: str) -> bool:
        try:
            found = store.stat(join(entry.path.rpartition("/")[0], other))
        except (NotFoundError, UnsafeError):
            return False
        return found.kind is EntryKind.FILE

    return Listing(
        {name: entry},
        frozenset(),
        lambda _, n: _head(store, entry, n),
        inside,
        single=name,
        beside=beside,
    )


def _head(store: Store, entry: Entry | None, length: int) -> bytes:
    """Return up to `length` first bytes; none for special files or files that have shrunk."""
    if entry is None or entry.kind is not EntryKind.FILE or entry.archived:
        return b""
    try:
        return store.read(entry.path, 0, min(length, entry.size))
    except (CorruptError, UnsafeError):
        return b""
