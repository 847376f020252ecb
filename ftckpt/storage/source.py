"""The files of one checkpoint: one listing, and safe reads by relative names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ftckpt.errors import (
    CorruptError,
    NotFoundError,
    UnavailableError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.extents import Extent
from ftckpt.findings import Finding, finding

from .prefetch import Lookahead
from .remotes import split
from .store import Entry, EntryKind, Opens, Reader, Store, is_shadow

if TYPE_CHECKING:
    from ftckpt.workers.limits import RateLimit

# How a file begins that Git LFS has not fetched, and its largest size (see `lfs_pointers`).
LFS_POINTER, MAX_POINTER = b"version https://git-lfs.github.com/spec/", 1024
# A hub's cache is all links: then one note says so.
_NAMED_LINKS = 5


def safe_name(name: object, *, named_by: str) -> str:
    """Return `name` if it can only mean a file below the checkpoint.

    `name` comes from the file `named_by` (an index, manifest or metadata) and may be anything.

    Raises:
        UnsafeError: absolute, climbing, empty, or not portable (backslash, drive, NUL).
    """
    bad = (
        not isinstance(name, str)
        or not name
        or name.startswith(("/", "~"))
        or "\\" in name
        or "\0" in name
        or (len(name) > 1 and name[1] == ":")
        or any(part in ("", ".", "..") for part in name.split("/"))
    )
    if bad:
        raise UnsafeError(
            f"{named_by} names the file {name!r}, which does not lie inside the checkpoint",
            kind="unsafe-path",
            file=named_by,
        )
    assert isinstance(name, str)
    return name


@dataclass(frozen=True)
class Source:
    """A checkpoint's place: a store, a path in it, and one trusted listing.

    Attributes:
        base: path of the checkpoint in the store; "" for the store's own URL.
        entries: every file below `base`, or the one file of a one-file checkpoint, by path relative
            to `base` (for a single file: its basename).
        single: whether the checkpoint is one file; `base` is then its directory.
        named: if several checkpoints lie in one directory, the file that names this one; else "".
        lookahead: the present read-ahead; shared by parts.
    """

    store: Store
    base: str
    entries: Mapping[str, Entry]
    single: bool = False
    named: str = ""
    lookahead: Lookahead = field(default_factory=Lookahead, repr=False, compare=False)

    @classmethod
    def directory(cls, store: Store, base: str = "") -> Source:
        """List the directory `base` once and return its source."""
        skip = len(base) + 1 if base else 0
        entries = {e.path[skip:]: e for e in store.walk(base) if not is_shadow(e.path)}
        return cls(store, base, entries)

    @classmethod
    def file(cls, store: Store, entry: Entry) -> Source:
        """Return the source of a one-file checkpoint."""
        base, _, name = entry.path.rpartition("/")
        return cls(store, base, {name: entry}, single=True)

    @classmethod
    def some_of(cls, store: Store, base: str, named: str, entries: Iterable[Entry]) -> Source:
        """Return the source of a checkpoint that is some files of the directory `base`.

        `named` is the file that names the checkpoint; `entries` have the store's paths.
        """
        skip = len(base) + 1 if base else 0
        return cls(store, base, {e.path[skip:]: e for e in entries}, named=named)

    def part(self, prefix: str) -> Source:
        """Return the files below `prefix` as a source, without listing again."""
        skip = len(prefix) + 1
        inside = {k[skip:]: e for k, e in self.entries.items() if k.startswith(prefix + "/")}
        return Source(self.store, self.path(prefix), inside, lookahead=self.lookahead)

    @cached_property
    def url(self) -> str:
        """The path or URL as the user would type it."""
        named = self.named or (next(iter(self.entries)) if self.single else "")
        where = self.path(named) if named else self.base
        return self.store.describe(where)

    @cached_property
    def name(self) -> str:
        """The last path element: `step-1000`, `model.pt`."""
        return split(self.url.rstrip("/"))[1]

    @property
    def nbytes(self) -> int:
        """Sum of the sizes of all files."""
        return sum(e.size for e in self.entries.values())

    def path(self, name: str) -> str:
        """Return the store's path of a file of this checkpoint."""
        return f"{self.base}/{name}" if self.base else name

    def entry(self, name: str) -> Entry:
        """Return the entry of a file that must exist and be readable.

        Raises:
            CorruptError: it does not exist, or is a link to nothing (`missing-file`), or is another
                file in another place (`copies-differ`).
            UnavailableError: it exists, but the listing did not show it.
            UnsafeError: it is a fifo, socket or device (`special-file`).
        """
        entry = self.entries.get(name)
        if entry is None:
            self.require_absent(name)
            raise CorruptError(f"{name} is missing", kind="missing-file", file=name)
        if entry.dangling:
            raise leads_nowhere(name, entry)
        if entry.kind is EntryKind.SPECIAL:
            raise UnsafeError(f"{name} is not a regular file", kind="special-file", file=name)
        if entry.differs:
            from .several_places import copies_differ

            raise copies_differ(name, entry.differs)
        return entry

    def require_absent(self, name: str) -> None:
        """Look up a name that the listing does not show, because a short listing proves nothing.

        Raises:
            UnavailableError: it exists.
        """
        try:
            self.store.stat(self.path(name))
        except (
            NotFoundError,
            UnsafeError,
            UnsupportedError,
        ):  # last two: not a file's name
            return
        raise UnavailableError(
            f"the listing of {self.url} does not show {name}, which is there",
            hint="the listing was stale, or the file has just been written: try again",
            file=name,
        )

    def changed(self, names: Iterable[str]) -> list[str]:
        """List again; return those of `names` that are new, gone or not the same version."""
        wanted = list(names)
        try:
            if self.single:
                now = {name: self.store.stat(self.path(name)) for name in wanted}
            else:
                now = dict(Source.directory(self.store, self.base).entries)
        except NotFoundError:
            now = {}
        return [name for name in wanted if not _is_same(self.entries.get(name), now.get(name))]

    def opener(self, name: str) -> tuple[Opens, str]:
        """Return the opener of a file without read-ahead, and its path there."""
        return self.store, self.path(name)

    def head(self, name: str, length: int) -> bytes:
        """Return up to `length` first bytes of a file that must exist."""
        return self.read(name, 0, min(length, self.size(name)))

    def stored(self, name: str) -> str:
        """Return the store's file with the bytes of a name: itself, unless unpacked."""
        return name

    def shown(self, name: str) -> str:
        """Return the name of a file's readable content: its own, unless unpacked."""
        return name

    def size(self, name: str) -> int:
        """Return the size of a file that must exist; 0 for a link to nothing."""
        listed = self.entries.get(name)
        return 0 if listed is not None and listed.dangling else self.entry(name).size

    def open(self, name: str) -> Reader:
        """Open a file that must exist."""
        self.entry(name)
        ahead = self.lookahead.current
        return self.store.open(self.path(name)) if ahead is None else ahead.open(self.path(name))

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes at `offset`; None reads to the listed end.

        Raises:
            IncompleteError: it begins as a Git LFS pointer does (`unfetched-file`).
        """
        size = self.size(name)
        with self.open(name) as reader:
            data = reader.read(offset, size - offset if length is None else length)
        _require_fetched(name, offset, data)
        return data

    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order, read concurrently if that helps.

        Raises:
            IncompleteError: a file begins as a Git LFS pointer does (`unfetched-file`).
        """
        found = self.read_stored(extents)
        for extent, data in zip(extents, found, strict=True):
            _require_fetched(extent.file, extent.offset, data)
        return found

    def read_stored(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent as `read_many` does, whatever the files are."""
        for name in {e.file for e in extents}:
            self.entry(name)
        wanted = [e._replace(file=self.path(e.file)) for e in extents]
        ahead = self.lookahead.current
        return self.store.read_many(wanted) if ahead is None else ahead.read_many(wanted)

    def require_fetched(self, name: str) -> None:
        """Look into a file if it is as small as a Git LFS pointer.

        Raises:
            IncompleteError: it is one (`unfetched-file`).
        """
        if self.size(name) <= MAX_POINTER:
            self.read(name)

    def limited(self, limiter: RateLimit | None) -> RateLimit | None:
        """Return the limiter that a reader must still use; None if the read-ahead applies it."""
        ahead = self.lookahead.current
        return None if ahead is not None and ahead.limiter is limiter else limiter


def leads_nowhere(name: str, entry: Entry) -> CorruptError:
    """Return the error about a link to nothing: a hub's cache without the blob, for one."""
    message = f"{name} is a link to {entry.link}, which is not there"
    return CorruptError(message, kind="missing-file", file=name)


def _require_fetched(name: str, offset: int, data: bytes) -> None:
    if not offset and data.startswith(LFS_POINTER):
        from .state_files import never_fetched

        raise never_fetched(name, data)


def _is_same(before: Entry | None, now: Entry | None) -> bool:
    return now is None if before is None else before.same_version(now)


def followed_links(source: Source, members: Iterable[str]) -> list[Finding]:
    """Note each of `members` that is a symbolic link (`link-followed`); one note for many."""
    entries = source.entries
    links = sorted(n for n in members if n in entries and entries[n].link is not None)
    if len(links) > _NAMED_LINKS:
        message = f"{len(links)} files are links and were followed, such as {links[0]}"
        return [finding("link-followed", message)]
    return [
        finding("link-followed", f"{name} is a link to {entries[name].link}", file=name)
        for name in links
    ]
