"""Refuse every write: the bases of stores that are only read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ftckpt.errors import FtckptError, UnsupportedError

from .keys import children_of
from .store import Entry, Reader, Store, Upload, Usage


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
