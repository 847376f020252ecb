"""The store interface: the only access to bytes.

A store is a flat space of keys below one URL. It is not a filesystem: there are no cursors, nobody
sees half a write, and a directory is only a common prefix. Keys are relative POSIX paths without
`.` or `..`; `""` is the URL itself, if that names one object.

Guarantees of every store (`tests/conformance/stores.py` tests each):
- `walk` and `children` are complete or raise; a failed or short listing is never an empty one.
- `read` and `readinto` return exactly the requested bytes, or raise; a short answer is an error.
- `put` is all or nothing, and durable when it returns. `create` never replaces: if the key exists
  it raises ExistsError, even if two writers race, or `Traits.conditional_put` says that the store
  cannot guarantee this.
- `delete` and `erase` answer for each key on its own; `erase` touches nothing that was replaced.
- Errors are ftckpt's: NotFoundError, DeniedError, UnavailableError after retries, NoResourceError,
  UnsupportedError (also for an archived object). No other exception leaves a store.
- Every method may be called from many threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
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


def is_shadow(path: str) -> bool:
    """Say whether a file is one that macOS writes beside `NAME` as `._NAME`, and tar and SMB carry.

    It holds attributes of that file and has its suffix; no checkpoint has such a name.
    """
    return path.rpartition("/")[2].startswith("._")


class EntryKind(StrEnum):
    """The kind of a name."""

    FILE = "file"
    DIRECTORY = "directory"
    SPECIAL = "special"


class Entry(NamedTuple):
    """One name in a listing.

    Attributes:
        path: key, relative to the store's URL.
        size: bytes; 0 for directories.
        mtime: seconds since the epoch, if the store keeps it.
        kind: file, directory, or special (fifo, socket, device, dangling link).
        link: target text if the name is a symbolic link; kind and size are the target's.
        etag: the store's own version of the content, if it has one.
        archived: whether it must be restored from an archive tier before it can be read.
        shared: for a local file with several names (hard links): `device:inode`, and their number.
        version: in a history of versions, the store's name of this one.
        copies: number of further places that hold it (`storage.gathered`).
        differs: how its copies there differ, in words; "" if they may be one file.
        inode: for a local file the number of its inode, and the time of that's last change in ns.
        dangling: whether it is a link to nothing.
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
    copies: int = 0
    differs: str = ""
    inode: tuple[int, int] | None = None
    dangling: bool = False

    def same_object(self, other: Entry) -> bool:
        """Whether both are one object with one content, as far as the store can tell."""
        if self.etag is not None and other.etag is not None:
            return (self.path, self.size, self.etag) == (other.path, other.size, other.etag)
        alike = (self.path, self.size, self.mtime) == (other.path, other.size, other.mtime)
        return alike and not self._is_other_inode(other)

    def same_version(self, other: Entry | None) -> bool:
        """Whether a later look at the name shows what this one did: nothing replaced it between."""
        return (
            other is not None
            and (self.size, self.mtime, self.etag, self.kind)
            == (other.size, other.mtime, other.etag, other.kind)
            and not self._is_other_inode(other)
        )

    @property
    def touched(self) -> float | None:
        """When anything last happened to the file, in seconds since the epoch; None if unknown.

        `rsync -a`, `cp -p` and `tar x` give a file its old time while it arrives.
        """
        if self.mtime is None or self.inode is None:
            return self.mtime
        return max(self.mtime, self.inode[1] / 1e9)

    def _is_other_inode(self, other: Entry) -> bool:
        """Whether a file was renamed over the other, with its size and its times.

        Either mark alone proves nothing: a mounted service (FUSE) may number a file anew whenever
        it is asked, and a new name or another mode (`cp -al`, `chmod`) changes the time.
        """
        if self.inode is None or other.inode is None:
            return False
        return all(one != two for one, two in zip(self.inode, other.inode, strict=True))


class Unfinished(NamedTuple):
    """An unfinished upload of a large object: it costs storage, and no listing shows it.

    Attributes:
        path: its key.
        id: the store's name of the upload.
        started: seconds since the epoch.
    """

    path: str
    id: str
    started: float


class Traits(NamedTuple):
    """A store's capabilities, as values, so that callers need not test types.

    Attributes:
        local: its keys are local files (`Store.local_path` works).
        conditional_put: `create` holds against a race. None: not probed yet.
        gap: reads of ranges closer than this many bytes are better done as one.
        parallel: useful number of concurrent reads.
        joint_uploads: whether several machines can send parts of one object (`Store.join_upload`).
        links: whether something in it can be a link, or neither file nor directory.
    """

    local: bool
    conditional_put: bool | None
    gap: int
    parallel: int
    joint_uploads: bool = False
    links: bool = True


class Usage(NamedTuple):
    """Use of a store since it was opened.

    Attributes:
        requests: requests sent to the service, retries included; 0 for local files.
        bytes_read: bytes of object content received.
    """

    requests: int = 0
    bytes_read: int = 0


class Reader(Protocol):
    """One open object, read by ranges; may be used from many threads."""

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`; TruncatedError if the object is shorter."""
        data = bytearray(length)
        self.readinto(offset, memoryview(data))
        return bytes(data)

    @abstractmethod  # without it `read` would return zeros
    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`; TruncatedError if the object is shorter."""

    def fileno(self) -> int | None:
        """Return the descriptor of a local file, or None; `Usage` does not count its use."""
        return None

    def close(self) -> None:
        """Release it; do not read afterwards."""

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


class Opens(Protocol):
    """An opener of objects by path: a store, or a view of several."""

    @property
    def traits(self) -> Traits:
        """The properties of reading from it."""

    def open(self, path: str) -> Reader:
        """Open one object for ranged reads."""


class Upload(ABC):
    """One large object that is being written in pieces.

    It is not complete before `finish` returns: a store either shows nothing until then, or (a local
    one) shows the bytes under the key itself, which the caller chose in a staging place.

    Attributes:
        unit: every write but the last has this many bytes at a multiple of it; 1 if unrestricted.
    """

    unit: int

    @abstractmethod
    def write(self, offset: int, view: memoryview) -> None:
        """Write bytes at `offset`; from any thread, in any order, also repeatedly."""

    @abstractmethod
    def finish(self, size: int | None = None) -> None:
        """Make it whole and durable; every byte must have been written.

        `size` is its real size, if smaller than announced.

        Raises:
            UnavailableError: the store does not hold what was written.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go without finishing; the store keeps it for a resume, or sweeps it away."""


class JointUpload(Upload):
    """An upload to which several machines send parts; nothing is visible until one finishes it.

    Letting it go does not end it.
    """

    @abstractmethod
    def mark(self, offset: int) -> str:
        """Return what the store says of the part that was sent at an offset, in one line."""

    @abstractmethod
    def kept(self) -> Collection[int] | None:
        """Return the offsets of the known parts that the store still has; others are forgotten.

        None where the upload is gone. Where it is gone because it was finished, and the object is
        what the known parts make, all of them are kept.
        """


class Store(ABC):
    """A flat space of keys below one URL (see the module's docstring for its guarantees).

    Attributes:
        url: as given.
        options: its settings; places elsewhere that are named here use the same ones.
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
        """Return the entries directly below `path`, sorted by path.

        Raises:
            NotFoundError: nothing lies below it and it is not a directory.
        """

    def names(self, path: str = "", most: int | None = None) -> dict[str, EntryKind]:
        """Return the names directly below `path`, sorted, with their kinds only.

        If each size costs a call, this is several times faster than `children`. It returns at most
        `most` names (None: all), any of them, and need not list more.

        Raises:
            NotFoundError: as `children`.
        """
        skip = len(path) + 1 if path else 0
        return {entry.path[skip:]: entry.kind for entry in self.children(path)[:most]}

    @abstractmethod
    def walk(self, path: str = "") -> list[Entry]:
        """Return every FILE and SPECIAL below `path`, at any depth, sorted by path.

        Directories that are links are not entered (they may be loops) and come as SPECIAL.

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
        """Return the bytes of each extent, in order, read concurrently if that helps."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Store `data` under `path`, replacing an existing object, atomically and durably."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> None:
        """Store `data` under `path`, which must not exist.

        Raises:
            ExistsError: the key exists and its content is not from this very call.
        """

    def replace(self, entry: Entry, data: bytes) -> None:
        """Store `data` under a key in place of the listed object, and of no other.

        A store without conditions checks just before.

        Raises:
            NotFoundError, IncompleteError: it is gone, or was replaced since.
        """
        self.require_still(entry)
        self.put(entry.path, data)

    @abstractmethod
    def upload(self, path: str, size: int) -> Upload:
        """Begin or resume an object of `size` bytes under `path`, in pieces of bounded memory.

        Raises:
            NoResourceError: the store already knows that it has no room.
            DeniedError, UnavailableError: as `put`.
        """

    def begin_joint_upload(self, path: str) -> str:
        """Begin an object to which several machines send parts; return the upload's name.

        Raises:
            UnsupportedError: the store has no such uploads (`Traits.joint_uploads`).
            DeniedError, UnavailableError: as `put`.
        """
        raise UnsupportedError(f"{self.url} takes an object from one machine alone")

    def join_upload(
        self, path: str, size: int, upload: str, marks: Mapping[int, str]
    ) -> JointUpload:
        """Go on with an upload that was begun anywhere.

        Args:
            path: of the object.
            size: of the whole object.
            upload: its name.
            marks: of parts that others have sent, by offset.

        Raises:
            UnsupportedError: the store has no such uploads.
            RefusedError: a mark is none.
        """
        raise UnsupportedError(f"{self.url} takes an object from one machine alone")

    def require_still(self, entry: Entry) -> None:
        """Check that a listed object is unchanged.

        Raises:
            NotFoundError: it is gone.
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

        `entry` comes from `stat` or a listing and must be unchanged; an object at `copy` is
        replaced.

        Raises:
            UnsupportedError: the store cannot do it.
            NotFoundError: the original is gone.
            IncompleteError: it was replaced since, and the store noticed.
            UnavailableError: the stored object has another size.
        """
        raise UnsupportedError(f"{self.url} cannot copy what it holds")

    @abstractmethod
    def delete(self, paths: Sequence[str]) -> Mapping[str, FtckptError | None]:
        """Delete keys; for each, None when it is gone, or its error."""

    def erase(self, entries: Sequence[Entry]) -> list[FtckptError | None]:
        """Delete listed objects for good, each only while it is unchanged.

        A version from `history` is deleted whatever the key shows now.

        Returns:
            For each entry, in order, None when it is gone, or its error: RefusedError if the key
                holds another object now. A store without conditions checks just before.
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
        """Return every version of some files, deletions included; empty if none are kept.

        `files` come from one listing of a directory or of a file.
        """
        return []

    def unfinished(self, path: str = "") -> list[Unfinished]:
        """Return the unfinished uploads below `path`, sorted."""
        return []

    def last_sent(self, upload: Unfinished) -> float | None:
        """Return when the last part of an upload arrived, in seconds since the epoch; None of none.

        Raises:
            UnsupportedError: the service does not say when.
        """
        return None

    def abort(self, uploads: Sequence[Unfinished]) -> list[FtckptError | None]:
        """Abort unfinished uploads; for each, in order, None when it is gone."""
        return [None] * len(uploads)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes at `offset`; None reads to the end."""
        with self.open(path) as reader:
            size = self.stat(path).size if length is None else 0
            return reader.read(offset, size - offset if length is None else length)

    def parts(self) -> tuple[Store, ...]:
        """Return the stores that it is made of: itself, unless it gathers several."""
        return (self,)

    def places_of(self, path: str) -> tuple[str, ...]:
        """Return the URLs of the places that hold a key, if the store gathers several; else ()."""
        return ()

    def usage(self) -> Usage:
        """Return the use so far; zeros if the store does not count."""
        return Usage()

    def local_path(self, path: str = "") -> str | None:
        """Return the local path, or None if the store is not local."""
        return None

    def identity(self, path: str = "") -> str:
        """Return a key's unique identity, however its place was spelled."""
        return self.describe(path).rstrip("/")

    def describe(self, path: str = "") -> str:
        """Return the URL of a key as a user would type it."""
        if path and self.url.endswith(":") and not self.traits.local:  # a remote itself
            return self.url + path
        return f"{self.url.rstrip('/')}/{path}" if path else self.url


def join(base: str, path: str) -> str:
    """Join two store paths, either of which may be empty."""
    return f"{base}/{path}" if base and path else base or path


def relative(base: str, path: str) -> str:
    """Return a store path as seen from `base`, which may be empty: the opposite of `join`."""
    return path[len(base) + 1 if base else 0 :]
