"""The store seam: the only hands on bytes.

A store is a flat space of keys below one URL. It is not a filesystem: there are no cursors, nobody
sees half a write, and a directory is only a common prefix. Keys are relative POSIX paths without
`.` or `..`; `""` is the URL itself, where that names one object.

What every store promises (`tests/conformance/stores.py` holds each to it):
- `walk` and `children` are complete or raise; a failed or short listing is never an empty one.
- `read` and `readinto` return exactly the bytes asked for, or raise; a short answer is an error.
- `put` is all or nothing, and durable when it returns. `create` never replaces: if the key exists
  it raises ExistsError, also when two writers race, or the store says by `Traits.conditional_put`
  that it cannot hold this.
- `delete` and `erase` answer for each key on its own; `erase` touches nothing that was replaced.
- Errors are ftckpt's: NotFoundError, DeniedError, UnavailableError after retries, NoResourceError,
  UnsupportedError (an archived object among others). No other exception leaves a store.
- Every method may be called from many threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from ftckpt.errors import (
    FtckptError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    UnsupportedError,
)

from .options import StoreOptions

if TYPE_CHECKING:
    from ftckpt.extents import Extent


class EntryKind(StrEnum):
    """What a name stands for."""

    FILE = "file"
    DIRECTORY = "directory"
    SPECIAL = "special"


class Entry(NamedTuple):
    """One name in a listing.

    Attributes:
        path: key, relative to the store's URL.
        size: bytes; 0 for directories.
        mtime: seconds since the epoch, where the store knows.
        kind: file, directory, or special (fifo, socket, device, dangling link).
        link: target text where the name is a symbolic link; kind and size are the target's.
        etag: the store's own version of the content, where it has one.
        archived: whether it must be restored from an archive tier before it can be read.
        shared: where a local file has several names (hard links): what they have in common,
            `device:inode`, and how many there are.
        version: in a history of versions, the store's name of this one.
    """

    path: str
    size: int
    mtime: float | None = None
    kind: EntryKind = EntryKind.FILE
    link: str | None = None
    etag: str | None = None
    archived: bool = False
    shared: tuple[str, int] | None = None
    version: str | None = None

    def same_object(self, other: Entry) -> bool:
        """Say whether both are one object with one content, as far as the store can tell."""
        if self.etag is not None and other.etag is not None:
            return (self.path, self.size, self.etag) == (other.path, other.size, other.etag)
        return (self.path, self.size, self.mtime) == (other.path, other.size, other.mtime)


class Unfinished(NamedTuple):
    """A large object that somebody has begun to upload: it costs storage, and no listing shows it.

    Attributes:
        path: its key.
        id: the store's name of the upload.
        started: seconds since the epoch.
    """

    path: str
    id: str
    started: float


class Traits(NamedTuple):
    """What a store can do, as a value, so that callers ask instead of testing types.

    Attributes:
        local: its keys are files of this machine (`Store.local_path` works).
        conditional_put: `create` holds against a race. None: not probed yet.
        gap: reads of ranges closer than this many bytes are better done as one.
        parallel: how many reads are worth having in flight.
    """

    local: bool
    conditional_put: bool | None
    gap: int
    parallel: int


class Usage(NamedTuple):
    """What a store was asked for since it was opened.

    Attributes:
        requests: requests sent to the service, retries included; 0 for local files.
        bytes_read: bytes of object content received.
    """

    requests: int = 0
    bytes_read: int = 0


class Reader(Protocol):
    """One open object, read by ranges; may be used from many threads."""

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`; TruncatedError where the object is shorter."""

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`; TruncatedError where the object is shorter."""

    def fileno(self) -> int | None:
        """Return the descriptor of a file of this machine, or None; `Usage` counts no use of it."""
        return None

    def close(self) -> None:
        """Release it; reading afterwards is an error of the caller."""

    def __enter__(self) -> Self:
        """Return itself."""

    def __exit__(self, *exc: object) -> None:
        """Close it."""


class Opens(Protocol):
    """What opens objects by a path: a store, or what shows more than one does."""

    @property
    def traits(self) -> Traits:
        """What reading from it is like."""

    def open(self, path: str) -> Reader:
        """Open one object for ranged reads."""


class Upload(ABC):
    """One large object that is being written in pieces.

    Nobody takes it for whole before `finish` returns: a store either shows nothing until then, or
    (`resumes`) shows the bytes under the key itself, which the caller chose in a staging place.

    Attributes:
        unit: every write but the last of the object is of this many bytes at a multiple of it;
            1 where anything goes.
        resumes: whether bytes of an earlier upload of the same key and size are still there.
    """

    unit: int
    resumes: bool

    @abstractmethod
    def write(self, offset: int, view: memoryview) -> None:
        """Write bytes at `offset`; from any thread, in any order, each place once or again."""

    @abstractmethod
    def finish(self, size: int | None = None) -> None:
        """Make it whole and durable; every byte must have been written.

        Args:
            size: bytes that it has, where those are fewer than were announced.

        Raises:
            UnavailableError: the store does not hold what was written.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go without finishing; what a store keeps of it can be resumed or is swept away."""


class Store(ABC):
    """A flat space of keys below one URL (see the module's docstring for its promises).

    Attributes:
        url: as it was given.
        traits: what it can do.
        options: how it was reached; what lies elsewhere and is named here is reached the same way.
    """

    url: str
    traits: Traits
    options: StoreOptions = StoreOptions()

    @abstractmethod
    def stat(self, path: str) -> Entry:
        """Return the entry of one key; a prefix of other keys is a DIRECTORY.

        Raises:
            NotFoundError: neither a key nor a prefix.
        """

    @abstractmethod
    def children(self, path: str = "") -> list[Entry]:
        """Return what lies directly below `path`, sorted by path.

        Raises:
            NotFoundError: nothing lies below it and it is not a directory.
        """

    def names(self, path: str = "", most: int | None = None) -> dict[str, EntryKind]:
        """Return the names directly below `path`, sorted, each with its kind and nothing else.

        Where sizes cost a call each, this is several times faster than `children`.

        Args:
            path: of the directory.
            most: at most this many, whichever come first; None for all. More than that
                need not be listed.

        Raises:
            NotFoundError: as `children`.
        """
        skip = len(path) + 1 if path else 0
        return {entry.path[skip:]: entry.kind for entry in self.children(path)[:most]}

    @abstractmethod
    def walk(self, path: str = "") -> list[Entry]:
        """Return every FILE and SPECIAL below `path`, at any depth, sorted by path.

        Directories that are links are not entered (they may be loops); they come as SPECIAL.

        Raises:
            NotFoundError: as `children`.
        """

    @abstractmethod
    def open(self, path: str) -> Reader:
        """Open one object for ranged reads.

        Raises:
            NotFoundError, DeniedError, UnsupportedError (archived), UnsafeError (special file).
        """

    @abstractmethod
    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order, read concurrently where that helps."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Store `data` under `path`, replacing what was there, atomically and durably."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Store `data` under `path`, which must not exist.

        Raises:
            ExistsError: the key exists and its content is not from this very call.
        """

    def replace(self, entry: Entry, data: bytes) -> None:
        """Store `data` under a key in place of what was listed there, and of nothing else.

        Where the store knows no conditions, that is looked at just before.

        Raises:
            NotFoundError, IncompleteError: it is gone, or was replaced since.
        """
        self.require_still(entry)
        self.put(entry.path, data)

    @abstractmethod
    def upload(self, path: str, size: int) -> Upload:
        """Begin or resume an object of `size` bytes under `path`, in pieces of bounded memory.

        Raises:
            NoResourceError: the store knows already that it has no room.
            DeniedError, UnavailableError: as `put`.
        """

    def require_still(self, entry: Entry) -> None:
        """Look again at what was listed.

        Raises:
            NotFoundError: it has gone.
            IncompleteError: it was replaced.
        """
        if not entry.same_object(self.stat(entry.path)):
            raise IncompleteError(
                f"{self.describe(entry.path)} was replaced since it was looked at",
                kind="changed-file",
                file=entry.path,
            )

    def duplicate(self, entry: Entry, copy: str) -> None:
        """Store the content of one key under another, in one act and without reading it here.

        Args:
            entry: what is copied, as `stat` or a listing gave it and as long as it is still that.
            copy: the other key; what stands there is replaced.

        Raises:
            UnsupportedError: the store cannot do it.
            NotFoundError: what is copied has gone.
            IncompleteError: it was replaced since, and the store noticed.
            UnavailableError: what is stored has another size.
        """
        raise UnsupportedError(f"{self.url} cannot copy what it holds")

    @abstractmethod
    def delete(self, paths: Sequence[str]) -> Mapping[str, FtckptError | None]:
        """Delete keys; for each, None when it is gone or the error that kept it."""

    def erase(self, entries: Sequence[Entry]) -> list[FtckptError | None]:
        """Delete what was listed, as long as it is still that; nothing of it can be had back.

        Args:
            entries: as a listing or `history` gave them; a version is deleted without regard to
                what the key shows now.

        Returns:
            For each entry, in order, None when it is gone, or the error that kept it: RefusedError
            where the key holds something else by now. Where the store knows no conditions, that is
            looked at just before.
        """
        result: list[FtckptError | None] = []
        for entry in entries:
            try:
                if not self.stat(entry.path).same_object(entry):
                    message = f"{self.describe(entry.path)} was replaced since it was listed"
                    raise RefusedError(message, kind="changed-file", file=entry.path)
            except NotFoundError:
                result.append(None)
            except FtckptError as error:
                result.append(error)
            else:
                result.append(self.delete([entry.path])[entry.path])
        return result

    def history(self, files: Sequence[Entry]) -> list[Entry]:
        """Return every version of some files, deletions included; nothing where none are kept.

        Args:
            files: as one listing of a directory, or of a file, gave them.
        """
        return []

    def unfinished(self, path: str = "") -> list[Unfinished]:
        """Return the uploads below `path` that nobody has finished, sorted."""
        return []

    def abort(self, uploads: Sequence[Unfinished]) -> list[FtckptError | None]:
        """Forget unfinished uploads; for each, in order, None when it is gone."""
        return [None] * len(uploads)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes at `offset` (to the end where None)."""
        with self.open(path) as reader:
            size = self.stat(path).size if length is None else 0
            return reader.read(offset, size - offset if length is None else length)

    def usage(self) -> Usage:
        """Return what was asked for so far; zeros where the store does not count."""
        return Usage()

    def local_path(self, path: str = "") -> str | None:
        """Return the path on this machine, or None where the store is not local."""
        return None

    def identity(self, path: str = "") -> str:
        """Return what tells a key from all others, however its place was spelled."""
        return self.describe(path).rstrip("/")

    def describe(self, path: str = "") -> str:
        """Return the URL of a key as a user would type it."""
        if path and self.url.endswith(":") and not self.traits.local:  # a remote itself
            return self.url + path
        return f"{self.url.rstrip('/')}/{path}" if path else self.url


def join(base: str, path: str) -> str:
    """Join two store paths, either of which may be empty."""
    return f"{base}/{path}" if base and path else base or path
