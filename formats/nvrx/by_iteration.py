"""A session's files by iteration: what lies by rank on disk is shown as one directory a step.

Parse the names of local checkpoints' files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ftckpt.errors import NotFoundError
from ftckpt.extents import Extent
from ftckpt.storage.readonly import ReadOnlyStore
from ftckpt.storage.store import Entry, EntryKind, Reader, Store, Usage, join

# `\d{7}` is what the manager writes; it cannot write an iteration of more digits.
_FILE = re.compile(r"(?:(\d{1,7})/)?iter_(\d{7})_(\d{1,7})_local(\.dirty)?\.pt")


class LocalFile(NamedTuple):
    """One file.

    Attributes:
        path: relative to the session, or to the folder of one rank.
        iteration: of the save.
        rank: whose state it is.
        holder: the rank that saved it; None in the folder of one rank.
        dirty: whether it is still being written.
    """

    path: str
    iteration: int
    rank: int
    holder: int | None
    dirty: bool

    @property
    def name(self) -> str:
        """The path below the session of a finished file with these numbers."""
        return f"{self.holder}/iter_{self.iteration:07d}_{self.rank}_local.pt"


def local_file(path: str) -> LocalFile | None:
    """Return what a path says, or None if it is not a local checkpoint's."""
    match = _FILE.fullmatch(path)
    if match is None:
        return None
    holder = None if match[1] is None else int(match[1])
    return LocalFile(path, int(match[2]), int(match[3]), holder, match[4] is not None)


class IterationStore(ReadOnlyStore):
    """A read-only view: `3/iter_0000010_3_local.pt` is `iter_0000010/3/iter_0000010_3_local.pt`.

    `below` holds the session at `base`; other files are not shown.
    """

    def __init__(self, below: Store, base: str) -> None:
        self.url = below.describe(base)
        self.traits = below.traits._replace(local=False)
        self.options = below.options
        self.refusal = f"{self.url} is read by its iterations: only its own job writes there"
        self._below = below
        self._base = base

    def parts(self) -> tuple[Store, ...]:
        """Return the stores that the session lies in."""
        return self._below.parts()

    def places_of(self, path: str) -> tuple[str, ...]:
        """Return the URLs of the places that hold a file."""
        return self._below.places_of(self._real(path))

    def usage(self) -> Usage:
        """Return the use of the store below."""
        return self._below.usage()

    def stat(self, path: str) -> Entry:
        """Return the entry of one key; an iteration is a DIRECTORY."""
        name = path.partition("/")[2]
        if local_file(name) is not None:
            return self._below.stat(self._real(path))._replace(path=path)
        self.walk(path)
        return Entry(path, 0, None, EntryKind.DIRECTORY)

    def walk(self, path: str = "") -> list[Entry]:
        """Return the files of all iterations, or of those below `path`, sorted by path."""
        skip = len(self._base) + 1 if self._base else 0
        found = []
        for entry in self._below.walk(self._base):
            file = local_file(entry.path[skip:])
            if file is not None:
                found.append(entry._replace(path=f"iter_{file.iteration:07d}/{file.path}"))
        inside = [e for e in found if not path or e.path.startswith(path + "/")]
        if not inside:
            raise NotFoundError(f"nothing lies below {self.describe(path)}", file=path)
        return sorted(inside)

    def open(self, path: str) -> Reader:
        """Open one object for ranged reads."""
        return self._below.open(self._real(path))

    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order."""
        return self._below.read_many([e._replace(file=self._real(e.file)) for e in extents])

    def describe(self, path: str = "") -> str:
        """Return the URL of a key as a user would type it: an iteration is `SESSION@10`."""
        folder, slash, _ = path.partition("/")
        number = folder.removeprefix("iter_")
        if not path or not number.isdecimal():
            return self.url
        return self._below.describe(self._real(path)) if slash else f"{self.url}@{int(number)}"

    def identity(self, path: str = "") -> str:
        """Return a key's unique identity: an iteration's is that of its session."""
        return self._below.identity(self._real(path) if "/" in path else self._base)

    def _real(self, path: str) -> str:
        return join(self._base, path.partition("/")[2])
