"""A store in the memory of this process, with the same guarantees as the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.errors import ExistsError, FtckptError, NotFoundError, TruncatedError

from .keys import children_of, safe_key
from .store import Entry, EntryKind, JointUpload, Reader, Store, Traits, Unfinished, Upload, Usage

if TYPE_CHECKING:
    from ftckpt.extents import Extent


class _Object(NamedTuple):
    data: bytes
    mtime: float
    version: int


class _Joint(NamedTuple):
    key: str
    began: float
    parts: dict[int, bytes]  # by offset
    arrived: list[float]  # when


class _Space:
    """The keys of one `memory://name`, shared by every store that opens it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, _Object] = {}
        self.uploads: dict[str, _Joint] = {}  # by name
        self.version = 0


_spaces: dict[str, _Space] = {}
_spaces_lock = threading.Lock()


class MemoryReader(Reader):
    """One object as it was when it was opened."""

    def __init__(self, key: str, url: str, data: bytes, count: Callable[[int], None]) -> None:
        self._key = key
        self._count = count
        self._url = url
        self._data = memoryview(data)

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`; TruncatedError if it is shorter."""
        return bytes(self._range(offset, length))

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`; TruncatedError if it is shorter."""
        view[:] = self._range(offset, view.nbytes)

    def close(self) -> None:
        """Release it."""

    def _range(self, offset: int, length: int) -> memoryview:
        if offset + length > len(self._data):
            raise TruncatedError(
                f"{self._url} ends at byte {len(self._data)}, before the end of the range "
                f"[{offset}, {offset + length})",
                file=self._key,
                offset=offset,
                length=length,
            )
        self._count(length)
        return self._data[offset : offset + length]


class MemoryUpload(Upload):
    """An object that becomes visible, whole, when it is finished."""

    unit = 1

    def __init__(self, store: MemoryStore, path: str, size: int) -> None:
        self._store = store
        self._path = path
        self._data = bytearray(size)

    def write(self, offset: int, view: memoryview) -> None:
        """Write bytes at `offset`."""
        self._data[offset : offset + view.nbytes] = view.cast("B")

    def finish(self, size: int | None = None) -> None:
        """Make it visible."""
        self._store.put(self._path, bytes(self._data[:size]))

    def close(self) -> None:
        """Let go; nothing is kept."""


class MemoryJointUpload(JointUpload):
    """An object whose parts several stores of this process send."""

    unit = 2  # more than one byte, so that a block comes as one part

    def __init__(self, store: MemoryStore, path: str, name: str, marks: Mapping[int, str]) -> None:
        self._store = store
        self._path = path
        self._name = name
        self._marks = dict(marks)

    def write(self, offset: int, view: memoryview) -> None:
        """Send a part."""
        data = bytes(view)
        self._store.take_part(self._path, self._name, offset, data)
        self._marks[offset] = _digest(data)

    def mark(self, offset: int) -> str:
        """Return a digest of a part."""
        return self._marks[offset]

    def kept(self) -> Collection[int] | None:
        """Compare what is known of the parts with those that are there."""
        try:
            there = {at: _digest(data) for at, data in self._parts().items()}
        except NotFoundError:
            return None
        self._marks = {at: mark for at, mark in self._marks.items() if there.get(at) == mark}
        return self._marks.keys()

    def finish(self, size: int | None = None) -> None:
        """Make it visible."""
        parts = self._parts()
        self._store.put(self._path, b"".join(parts[at] for at in sorted(self._marks)))
        self._store.abort([Unfinished(self._path, self._name, 0.0)])

    def close(self) -> None:
        """Let go; others may go on with it."""

    def _parts(self) -> dict[int, bytes]:
        return self._store.parts_of(self._path, self._name)


class MemoryStore(Store):
    """The keys below one `memory://name/prefix` of this process."""

    def __init__(self, url: str) -> None:
        self.url = url
        name, _, prefix = url.removeprefix("memory://").strip("/").partition("/")
        self._prefix = prefix
        self._bytes_read = 0
        with _spaces_lock:
            self._space = _spaces.setdefault(name, _Space())
        self.traits = Traits(
            local=False, conditional_put=True, gap=0, parallel=1, joint_uploads=True
        )

    def __reduce__(self) -> str | tuple[object, ...]:
        """Refuse to be pickled: another process has other memory."""
        raise TypeError(f"{self.url} is the memory of this process")

    def usage(self) -> Usage:
        """Return the bytes read so far."""
        return Usage(0, self._bytes_read)

    def _count(self, amount: int) -> None:
        with self._space.lock:
            self._bytes_read += amount

    def _key(self, path: str) -> str:
        return safe_key(self._prefix, path)

    def stat(self, path: str) -> Entry:
        """Return the entry of one key; a prefix of other keys is a DIRECTORY."""
        key = self._key(path)
        with self._space.lock:
            found = self._space.objects.get(key)
            if found is not None and key:
                return _entry(path, found)
            if any(_below(k, key) for k in self._space.objects):
                return Entry(path, 0, None, EntryKind.DIRECTORY)
        raise NotFoundError(f"{self.describe(path)} does not exist", file=path)

    def children(self, path: str = "") -> list[Entry]:
        """Return what lies directly below `path`, sorted by path."""
        return children_of(self.walk(path), path)

    def walk(self, path: str = "") -> list[Entry]:
        """Return every object below `path`, sorted by path."""
        key = self._key(path)
        skip = len(key) + 1 if key else 0
        prefix = f"{path}/" if path else ""
        with self._space.lock:
            found = [
                _entry(prefix + k[skip:], o)
                for k, o in self._space.objects.items()
                if _below(k, key)
            ]
        if not found:
            raise NotFoundError(f"nothing lies below {self.describe(path)}", file=path)
        return sorted(found)

    def open(self, path: str) -> MemoryReader:
        """Open one object for ranged reads."""
        key = self._key(path)
        with self._space.lock:
            found = self._space.objects.get(key)
        if found is None:
            raise NotFoundError(f"{self.describe(path)} does not exist", file=path)
        return MemoryReader(path, self.describe(path), found.data, self._count)

    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order."""
        return [self.open(e.file).read(e.offset, e.length) for e in extents]

    def put(self, path: str, data: bytes) -> None:
        """Store `data` under `path`, replacing an existing object."""
        with self._space.lock:
            self._store(self._key(path), data)

    def create(self, path: str, data: bytes) -> None:
        """Store `data` under `path`, which must not exist."""
        key = self._key(path)
        with self._space.lock:
            if key in self._space.objects:
                raise ExistsError(f"{self.describe(path)} exists already", file=path)
            self._store(key, data)

    def upload(self, path: str, size: int) -> MemoryUpload:
        """Begin an object of `size` bytes; it is invisible until it is finished."""
        return MemoryUpload(self, path, size)

    def begin_joint_upload(self, path: str) -> str:
        """Begin an object to which several stores send parts."""
        with self._space.lock:
            self._space.version += 1
            name = str(self._space.version)
            self._space.uploads[name] = _Joint(self._key(path), time.time(), {}, [])
        return name

    def join_upload(
        self, path: str, size: int, upload: str, marks: Mapping[int, str]
    ) -> MemoryJointUpload:
        """Go on with an upload that was begun here."""
        return MemoryJointUpload(self, path, upload, marks)

    def parts_of(self, path: str, upload: str) -> dict[int, bytes]:
        """Return the parts of a joint upload, by offset.

        Raises:
            NotFoundError: it is gone.
        """
        return self._joint(path, upload).parts

    def take_part(self, path: str, upload: str, offset: int, data: bytes) -> None:
        """Keep a part of a joint upload.

        Raises:
            NotFoundError: it is gone.
        """
        found = self._joint(path, upload)
        found.parts[offset] = data
        found.arrived.append(time.time())

    def _joint(self, path: str, upload: str) -> _Joint:
        with self._space.lock:
            found = self._space.uploads.get(upload)
        if found is None:
            raise NotFoundError(f"no such upload to {self.describe(path)}", file=path)
        return found

    def unfinished(self, path: str = "") -> list[Unfinished]:
        """Return the unfinished joint uploads below `path`, sorted."""
        key = self._key(path)
        skip = len(key) + 1 if key else 0
        prefix = f"{path}/" if path else ""
        with self._space.lock:
            return sorted(
                Unfinished(prefix + one.key[skip:], name, one.began)
                for name, one in self._space.uploads.items()
                if _below(one.key, key)
            )

    def last_sent(self, upload: Unfinished) -> float | None:
        """Return when the last part of a joint upload arrived."""
        with self._space.lock:
            found = self._space.uploads.get(upload.id)
        return max(found.arrived, default=None) if found is not None else None

    def abort(self, uploads: Sequence[Unfinished]) -> list[FtckptError | None]:
        """Forget joint uploads."""
        with self._space.lock:
            for upload in uploads:
                self._space.uploads.pop(upload.id, None)
        return [None] * len(uploads)

    def duplicate(self, entry: Entry, copy: str) -> None:
        """Store the content of one key under another."""
        self.require_still(entry)
        self.put(copy, self.read(entry.path))

    def delete(self, paths: Sequence[str]) -> Mapping[str, FtckptError | None]:
        """Delete keys; an absent one is gone."""
        result: dict[str, FtckptError | None] = {}
        for path in paths:
            try:
                key = self._key(path)
            except FtckptError as error:
                result[path] = error
                continue
            with self._space.lock:
                self._space.objects.pop(key, None)
            result[path] = None
        return result

    def _store(self, key: str, data: bytes) -> None:
        self._space.version += 1
        self._space.objects[key] = _Object(bytes(data), time.time(), self._space.version)


def _digest(data: bytes) -> str:
    import xxhash

    digest: str = xxhash.xxh3_128_hexdigest(data)
    return digest


def _below(key: str, prefix: str) -> bool:
    return not prefix or key.startswith(prefix + "/")


def _entry(path: str, found: _Object) -> Entry:
    return Entry(path, len(found.data), found.mtime, etag=str(found.version))
