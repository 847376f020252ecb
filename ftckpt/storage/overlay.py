"""A store with a few added small objects, to prove a result before it is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftckpt.errors import NotFoundError
from ftckpt.extents import Extent

from .memory import MemoryReader
from .readonly import StoreView
from .store import Entry, EntryKind, Reader, Store


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
