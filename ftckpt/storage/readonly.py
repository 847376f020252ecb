"""Refuse every write: the bases of stores that are only read.

A store with a few added small objects, to prove a result before it is published.

A store whose names were all listed at once, so that questions about them cost no requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftckpt.errors import FtckptError, NotFoundError, UnsupportedError
from ftckpt.extents import Extent

from .keys import children_of
from .memory import MemoryReader
from .store import Entry, EntryKind, Reader, Store, Upload, Usage


class ReadOnlyStore(Store):
    """A store that cannot be written. A subclass lists it by `walk` and reads it.

    Attributes:
        refusal: the message of a refused write, one sentence.
    """

    refusal: str

    def children(self, path: str = "") -> list[Entry]:
        """Return what lies directly below `path`, sorted by path."""
        return children_of(self.walk(path), path)

    def put(self, path: str, data: bytes) -> None:
        """Refuse."""
        raise self._read_only()

    def create(self, path: str, data: bytes) -> None:
        """Refuse."""
        raise self._read_only()

    def upload(self, path: str, size: int) -> Upload:
        """Refuse."""
        raise self._read_only()

    def delete(self, paths: Sequence[str]) -> Mapping[str, FtckptError | None]:
        """Refuse."""
        return {path: self._read_only() for path in paths}

    def _read_only(self) -> UnsupportedError:
        return UnsupportedError(self.refusal)


class StoreView(ReadOnlyStore):
    """Another store, of which a subclass shows something in another way."""

    def __init__(self, below: Store, refusal: str) -> None:
        self.url = below.url
        self.traits = below.traits
        self.options = below.options
        self.refusal = refusal
        self._below = below

    def usage(self) -> Usage:
        """Return the usage of the store below."""
        return self._below.usage()

    def stat(self, path: str) -> Entry:
        """Return the entry of one key."""
        return self._below.stat(path)

    def walk(self, path: str = "") -> list[Entry]:
        """Return every object below `path`, sorted by path."""
        return self._below.walk(path)

    def open(self, path: str) -> Reader:
        """Open one object for ranged reads."""
        return self._below.open(path)


class OverlayStore(StoreView):
    """A read-only store with additional objects in memory, which hide the store's own."""

    def __init__(self, below: Store, added: Mapping[str, bytes]) -> None:
        super().__init__(below, f"{below.url} is only looked at as it will be")
        self._added = dict(added)

    def stat(self, path: str) -> Entry:
        """Return the entry of one key."""
        if path in self._added:
            return self._entry(path)
        return self._below.stat(path)

    def walk(self, path: str = "") -> list[Entry]:
        """Return every object below `path`, sorted by path."""
        inside = [k for k in self._added if not path or k.startswith(path + "/")]
        try:
            found = [e for e in self._below.walk(path) if e.path not in self._added]
        except NotFoundError:
            if not inside:
                raise
            found = []
        return sorted(found + [self._entry(key) for key in inside])

    def open(self, path: str) -> Reader:
        """Open one object for ranged reads."""
        if path in self._added:
            return MemoryReader(path, self.describe(path), self._added[path], lambda _: None)
        return self._below.open(path)

    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order."""
        theirs = iter(self._below.read_many([e for e in extents if e.file not in self._added]))
        return [
            self.open(e.file).read(e.offset, e.length) if e.file in self._added else next(theirs)
            for e in extents
        ]

    def _entry(self, path: str) -> Entry:
        return Entry(path, len(self._added[path]), None, EntryKind.FILE)


class ListedStore(OverlayStore):
    """A store as one listing shows it; content is read from the store itself.

    `entries` is the result of `walk` for one path of it; nothing else exists there.
    """

    def __init__(self, below: Store, entries: Sequence[Entry]) -> None:
        super().__init__(below, {})
        self._entries = entries

    def stat(self, path: str) -> Entry:
        """Return the entry of one key; a prefix of other keys is a DIRECTORY."""
        for entry in self._entries:
            if entry.path == path:
                return entry
        self.walk(path)
        return Entry(path, 0, None, EntryKind.DIRECTORY)

    def walk(self, path: str = "") -> list[Entry]:
        """Return every object below `path`, sorted by path."""
        found = [e for e in self._entries if not path or e.path.startswith(path + "/")]
        if not found:
            raise NotFoundError(f"nothing lies below {self.describe(path)}", file=path)
        return found
