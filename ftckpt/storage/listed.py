"""A store whose names were all listed at once, so that questions about them cost no requests."""

from __future__ import annotations

from collections.abc import Sequence

from ftckpt.errors import NotFoundError

from .overlay import OverlayStore
from .store import Entry, EntryKind, Store


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
