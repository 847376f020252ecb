"""The listing for formats to recognise: one level of a directory, or one file.

Open a recognised directory or file.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, cached_property

from ftckpt.checkpoint import Checkpoint, Commit, CommitState
from ftckpt.errors import (
    CorruptError,
    IncompleteError,
    NoStateError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.own_files import GO_ON, MANIFEST, TRANSFER, under_way
from ftckpt.storage.remotes import split
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, EntryKind, Store, is_shadow, join

from .recognise import (
    FINISHED,
    UNFINISHED,
    Format,
    Listing,
    UnopenedPart,
    added_error,
    listing_of,
    recognise,
)
from .step_names import unfinished_marker

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


def recognise_at(store: Store, entry: Entry, formats: Sequence[Format]) -> UnopenedPart | None:
    """Return the first format that knows one directory or file; None if none does."""
    if entry.kind is EntryKind.SPECIAL:
        return None
    is_file = entry.kind is EntryKind.FILE
    listing = listing_of_file(store, entry) if is_file else listing_of_directory(store, entry.path)
    found = recognise(formats, listing)
    return None if found is None else UnopenedPart(entry, *found)


def open_part(store: Store, part: UnopenedPart) -> Checkpoint:
    """Open a recognised checkpoint: list it whole, parse headers and metadata.

    Raises:
        UnsupportedError: recognised by name, but not readable by this version; or a file without
            state (`NoStateError`).
        IncompleteError, CorruptError, UnsafeError: see `Format.open`. A sealed checkpoint without
            one of its sealed files is corrupt: its save did finish.
    """
    source = files_of(store, part.entry)
    try:
        return _finished(part, _opened(part.format, source))
    except IncompleteError as error:
        lost = _lost_since_sealed(source)
        if not lost:
            raise
        raise CorruptError(
            f"{lost} of {source.url} is missing: it was there when the checkpoint was sealed",
            hint="`ftckpt repair` restores it from a replica",
            kind="missing-file",
            file=lost,
        ) from error
    except (CorruptError, UnsafeError, NotFoundError) as first:
        # A bit that flipped in transit is right the second time; changes since then distinguish a
        # save in flight from damage.
        single = part.entry.kind is EntryKind.FILE
        again = files_of(store, store.stat(part.entry.path) if single else part.entry)
        try:
            return _finished(part, _opened(part.format, again))
        except (CorruptError, UnsafeError, NotFoundError) as second:
            from ftckpt.manifest.altered import as_damage  # only after a failure

            why = as_damage(second, again)
            moved = again.changed(source.entries)
            moved += [
                n for n, e in source.entries.items() if not e.same_version(again.entries.get(n))
            ]
            if moved and not isinstance(why, UnsafeError):
                raise IncompleteError(
                    f"{moved[0]} of {again.url} changed while it was being read",
                    hint="it is still being written, or being removed: try again",
                    kind="changed-file",
                    file=moved[0],
                ) from second
            raise why from first


def _opened(of: Format, source: Source) -> Checkpoint:
    try:
        return of.open(source)
    except (Exception, SystemExit) as error:
        other = added_error(of, error)
        if other is None:
            raise
        raise other from error


def _lost_since_sealed(source: Source) -> str:
    """Return the first missing file of a seal, or "".

    Also "" if another file has another size than its seal says: a trainer may be saving again into
    the sealed directory.
    """
    from ftckpt.manifest.locate import find  # only after a failure

    try:
        manifest = find(source)
    except (CorruptError, UnsafeError, UnsupportedError):
        return ""  # it proves nothing
    if manifest is None or any(
        file.path in source.entries and source.entries[file.path].size != file.size
        for file in manifest.files
    ):
        return ""
    return next((f.path for f in manifest.files if f.path not in source.entries), "")


def files_of(store: Store, entry: Entry) -> Source:
    """List the files of one directory or file.

    Raises:
        IncompleteError: a transfer to it is running, or was killed; or its trainer marked it so.
    """
    marker = _mark_beside(store, entry)
    if marker:
        raise IncompleteError(
            f"{marker} lies beside {store.describe(entry.path)}: its trainer has not finished"
            " saving it, or removing it, and does not load it",
            hint="an earlier checkpoint may be complete",
            kind="uncommitted",
            file=marker,
        )
    if entry.kind is EntryKind.FILE:
        return Source.file(store, entry)
    source = Source.directory(store, entry.path)
    if TRANSFER in source.entries and MANIFEST not in source.entries:
        raise IncompleteError(
            under_way(source.url),
            hint=GO_ON,
            file=TRANSFER,
        )
    if UNFINISHED in source.entries:
        raise IncompleteError(
            f"{source.url} has {UNFINISHED}: its trainer has not finished it, and does not load it",
            hint="an earlier checkpoint may be complete",
            kind="uncommitted",
            file=UNFINISHED,
        )
    return source


def _mark_beside(store: Store, entry: Entry) -> str:
    """Return the name of the mark beside a save that says it is unfinished; "" if there is none.

    It is looked for where a look costs nothing, and beside the files of NeMo, which writes it.
    """
    if not (store.traits.local or entry.path.endswith(".ckpt")):
        return ""
    return unfinished_marker(split(store.describe(entry.path))[1], _Beside(store, entry.path))


class _Beside:
    """The names in the directory of an entry: each is asked for by itself."""

    def __init__(self, store: Store, path: str) -> None:
        here = store.local_path(path)
        self._store, self._folder = store, path.rpartition("/")[0]
        self._local = os.path.dirname(os.path.abspath(here)) if here is not None else None

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if self._local is not None:
            return os.path.lexists(os.path.join(self._local, name))
        try:
            self._store.stat(f"{self._folder}/{name}".lstrip("/"))
        except NotFoundError:
            return False
        return True


def _finished(part: UnopenedPart, checkpoint: Checkpoint) -> Checkpoint:
    """Take a trainer's own mark for the commit marker of a format that has none.

    Raises:
        NoStateError: it is a file that holds no state of a training.
    """
    if checkpoint.no_state and part.entry.kind is EntryKind.FILE:
        raise NoStateError(checkpoint.no_state)
    if checkpoint.commit.state is CommitState.NO_MARKER and FINISHED in checkpoint.source.entries:
        checkpoint.commit = Commit(CommitState.COMMITTED, FINISHED)
    return checkpoint
