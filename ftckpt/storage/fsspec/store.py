"""Stores reached through fsspec: gs://, az://, and other installed filesystems.

Large objects on any fsspec filesystem: written in order, visible when closed.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

from ftckpt.errors import (
    ExistsError,
    FtckptError,
    MissingPackageError,
    NotFoundError,
    TruncatedError,
    UnavailableError,
    UnsupportedError,
    UsageError,
)
from ftckpt.extents import BLOCK
from ftckpt.own_files import TEMPORARY
from ftckpt.packages import needing
from ftckpt.storage.keys import children_of, safe_key
from ftckpt.storage.options import StoreOptions
from ftckpt.storage.ranges import PART, plan_runs, split_parts, waves
from ftckpt.storage.remotes import SCHEMES
from ftckpt.storage.retry import Backoff
from ftckpt.storage.secrets import complete, queries
from ftckpt.storage.store import Entry, EntryKind, Reader, Store, Traits, Upload, Usage

from .errors import is_transient, translate

if TYPE_CHECKING:
    from datetime import datetime

    from ftckpt.extents import Extent


class FsspecUpload(Upload):
    """One object, written from its beginning to its end: a part waits for those before it.

    `file` is fsspec's own file, opened for writing.
    """

    unit = BLOCK

    def __init__(self, store: Store, path: str, size: int, file: Any) -> None:
        self._store = store
        self._path = path
        self._size = size
        self._at = 0
        self._turn = threading.Condition()
        self._closed = False
        self._file = file

    def write(self, offset: int, view: memoryview) -> None:
        """Write one part when its turn comes; parts must begin in order."""
        with self._turn:
            self._turn.wait_for(lambda: self._at >= offset or self._closed)
            if self._closed:
                raise UnavailableError(f"writing {self._path} was given up", file=self._path)
            try:
                self._file.write(view)
            except Exception as error:
                raise self._failed(error) from error
            self._at = offset + len(view)
            self._turn.notify_all()

    def finish(self, size: int | None = None) -> None:
        """Close the object and compare its size."""
        self._size = self._size if size is None else size
        try:
            self._file.close()
        except Exception as error:
            raise self._failed(error) from error
        self._closed = True
        if self._store.stat(self._path).size != self._size:
            raise UnavailableError(
                f"{self._store.describe(self._path)} does not hold what was written to it",
                file=self._path,
            )

    def close(self) -> None:
        """Discard an unfinished object."""
        from fsspec.spec import AbstractBufferedFile

        with self._turn:
            if not self._closed and isinstance(self._file, AbstractBufferedFile):
                self._file.discard()
                self._file.closed = True  # or its finaliser would create a truncated object
            self._closed = True
            self._turn.notify_all()

    def _failed(self, error: Exception) -> FtckptError:
        if isinstance(error, FtckptError):
            return error
        return translate(error, self._store.describe(self._path), self._path, "write")


T = TypeVar("T")

_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}


def open_remote(url: str, scheme: str, options: StoreOptions) -> Store:
    """Return the store for a URL with a scheme of its own.

    Raises:
        UsageError: unknown scheme.
        MissingPackageError: its package is not installed.
        UnsupportedError: the URL is incomplete.
        UnavailableError, DeniedError: its server cannot be reached.
    """
    if scheme in ("s3", "s3a"):
        from ftckpt.storage.s3.store import S3Store

        with needing(f"{scheme}://"):
            return S3Store(url, options)
    with needing(f"{scheme}://"):
        import fsspec

    settings: dict[str, Any] = {}
    if options.anonymous and scheme in ("gs", "gcs"):
        settings["token"] = "anon"
    if options.requester_pays and scheme in ("gs", "gcs"):
        settings["requester_pays"] = True
    try:
        if scheme not in _PACKAGES:  # there the server's name is part of the address
            settings |= fsspec.get_filesystem_class(scheme)._get_kwargs_from_urls(complete(url))
        filesystem = fsspec.filesystem(
            scheme, use_listings_cache=False, skip_instance_cache=True, **settings
        )
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        hint = f"pip install {package}" if package else str(error)
        raise MissingPackageError(
            f"{scheme}:// needs a package that is not installed", hint=hint
        ) from error
    except ValueError as error:
        near = get_close_matches(scheme, SCHEMES, 1)
        hint = f"did you mean {near[0]}://?" if near else "s3://, gs://, az:// and hf:// are known"
        raise UsageError(f"{url}: {scheme}:// leads to no known store", hint=hint) from error
    except Exception as error:  # some connect at once, and raise any exception
        raise translate(error, url, "", "reach") from error
    return FsspecStore(url, filesystem, options)


class FsspecStore(Store):
    """The keys below one URL of an fsspec filesystem."""

    def __init__(self, url: str, filesystem: Any, options: StoreOptions) -> None:
        self.url = url
        self._fs = filesystem
        self._options = options
        self._root = str(filesystem._strip_protocol(complete(url))).rstrip("/")
        self._queries = {complete(one): query for one, query in queries().items()}
        self._requests = 0
        self._bytes_read = 0
        self.traits = Traits(local=False, conditional_put=None, gap=1 << 20, parallel=8)

    def usage(self) -> Usage:
        """Return the calls made and the bytes of content received (fsspec counts no requests)."""
        return Usage(self._requests, self._bytes_read)

    def call(self, doing: str, path: str, function: Callable[[], T]) -> T:
        """Return `function()`, retrying transient failures; raises ftckpt's errors."""
        backoff = Backoff(self._options.retry_seconds)
        while True:
            self._requests += 1
            try:
                return function()
            except FtckptError:
                raise
            except Exception as error:
                wait = backoff.pause() if is_transient(error) else None
                if wait is None:
                    raise translate(error, self.describe(path), path, doing) from error
            time.sleep(wait)

    def stat(self, path: str) -> Entry:
        """Return the entry of one key; a prefix of other keys is a DIRECTORY."""
        info = self.call("look up", path, lambda: self._fs.info(self.key(path)))
        if info["type"] == "directory":
            return Entry(path, 0, None, EntryKind.DIRECTORY)
        return _entry(path, info)

    def children(self, path: str = "") -> list[Entry]:
        """Return what lies directly below `path`, sorted by path."""
        return children_of(self.walk(path), path)

    def walk(self, path: str = "") -> list[Entry]:
        """Return every object below `path`, sorted by path."""
        base = self.key(path)
        infos = self.call("list", path, lambda: self._fs.find(base, detail=True))
        prefix = f"{path}/" if path else ""
        skip = len(base.strip("/")) + 1 if base.strip("/") else 0
        names = {name.strip("/"): info for name, info in infos.items()}
        found = [
            _entry(prefix + name[skip:], info)
            for name, info in names.items()
            if len(name) > skip and info["type"] == "file"
        ]
        if not found:
            raise NotFoundError(f"nothing lies below {self.describe(path)}", file=path)
        return sorted(found)

    def open(self, path: str) -> FsspecReader:
        """Open one object for ranged reads."""
        entry = self.stat(path)
        if entry.kind is not EntryKind.FILE:
            raise NotFoundError(f"{self.describe(path)} is not an object", file=path)
        return FsspecReader(self, path)

    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order, concurrently if the filesystem can."""
        result = [b""] * len(extents)
        runs = plan_runs(extents, self.traits.gap)
        for run in runs:
            self.require(run.file, run.offset, run.length)
        for wave in waves(runs):
            parts = [(r, o, n) for r in wave for o, n in split_parts(r.offset, r.length)]
            blocks = iter(self.ranges([(r.file, offset, n) for r, offset, n in parts]))
            for run in wave:
                data = b"".join(next(blocks) for _ in split_parts(run.offset, run.length))
                for want in run.wants:
                    result[want.asked] = data[want.start :][: want.length]
        return result

    def ranges(self, asked: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Return exactly the bytes of each (path, offset, length)."""
        if not asked:
            return []
        keys = [self.key(path) for path, _, _ in asked]
        starts = [offset for _, offset, _ in asked]
        ends = [offset + length for _, offset, length in asked]

        def fetch() -> list[bytes]:
            blocks: list[bytes] = self._fs.cat_ranges(keys, starts, ends, on_error="raise")
            return blocks

        try:
            blocks = self.call("read", asked[0][0], fetch)
        except TruncatedError:  # of one of them; the filesystem does not say which
            for path, offset, length in asked:
                if offset + length > self.stat(path).size:
                    raise self._truncated(path, offset, length) from None
            raise
        for (path, offset, length), block in zip(asked, blocks, strict=True):
            self._bytes_read += len(block)
            if len(block) != length:
                raise self._truncated(path, offset, length)
        return blocks

    def require(self, path: str, offset: int, length: int) -> None:
        """Raise TruncatedError for a long range beyond the end, before memory is reserved."""
        if length > PART and offset + length > self.stat(path).size:
            raise self._truncated(path, offset, length)

    def _truncated(self, path: str, offset: int, length: int) -> TruncatedError:
        return TruncatedError(
            f"{self.describe(path)} ends before the end of the range [{offset}, {offset + length})",
            file=path,
            offset=offset,
            length=length,
        )

    def put(self, path: str, data: bytes) -> None:
        """Store `data` under `path`, and compare the stored object with it."""
        self.call("write", path, lambda: self._fs.pipe_file(self.key(path), data))
        if self._stored(path) != data:
            raise UnavailableError(
                f"{self.describe(path)} does not hold what was written to it", file=path
            )

    def create(self, path: str, data: bytes) -> None:
        """Store `data` under `path`, which must not exist.

        Without an exclusive write in the filesystem it checks first, which does not exclude a race;
        `traits.conditional_put` says so.
        """
        if self.traits.conditional_put is None:
            directory = path.rpartition("/")[0]
            probe = f"{TEMPORARY}probe-{secrets.token_hex(8)}"
            honoured = self._honours_exclusive(f"{directory}/{probe}" if directory else probe)
            self.traits = self.traits._replace(conditional_put=honoured)
        if self.traits.conditional_put:
            self._write_exclusive(path, data)
        elif self._stored(path) is None:
            self.put(path, data)
        else:
            raise ExistsError(f"{self.describe(path)} exists already", file=path)

    def upload(self, path: str, size: int) -> FsspecUpload:
        """Begin an object; the filesystem decides whether it is visible before it is finished."""
        key = self.key(path)
        file = self.call("write", path, lambda: self._fs.open(key, "wb", block_size=BLOCK))
        return FsspecUpload(self, path, size, file)

    def duplicate(self, entry: Entry, copy: str) -> None:
        """Let the filesystem copy one key to another, and compare the size."""
        self.require_still(entry)
        path = entry.path
        self.call("copy", path, lambda: self._fs.cp_file(self.key(path), self.key(copy)))
        if self.stat(copy).size != entry.size:
            raise UnavailableError(
                f"{self.describe(copy)} does not hold what was copied to it", file=copy
            )

    def delete(self, paths: Sequence[str]) -> Mapping[str, FtckptError | None]:
        """Delete keys one by one; an absent one is gone."""
        return {path: self._delete(path) for path in paths}

    def key(self, path: str) -> str:
        """Return the filesystem's path of a key."""
        key = safe_key(self._root, path)
        query = self._queries.get(key)
        return key if query is None else f"{key}?{query}"

    def _stored(self, path: str) -> bytes | None:
        try:
            return self.call("read", path, lambda: bytes(self._fs.cat_file(self.key(path))))
        except NotFoundError:
            return None

    def _write_exclusive(self, path: str, data: bytes) -> None:
        attempts = 0

        def write() -> None:
            nonlocal attempts
            attempts += 1
            self._fs.pipe_file(self.key(path), data, mode="create")

        try:
            self.call("create", path, write)
        except ExistsError:
            # Refused at once: another writer's. Refused after a lost answer: perhaps our own.
            if attempts == 1 or self._stored(path) != data:
                raise

    def _honours_exclusive(self, probe: str) -> bool:
        try:
            self._write_exclusive(probe, b"1")
            try:
                self._write_exclusive(probe, b"2")
            except ExistsError:
                return True
            return False
        except UnsupportedError:
            return False
        finally:
            self._delete(probe)

    def _delete(self, path: str) -> FtckptError | None:
        try:
            self.call("delete", path, lambda: self._fs.rm_file(self.key(path)))
        except NotFoundError:
            return None
        except FtckptError as error:
            return error
        return None


class FsspecReader(Reader):
    """One object, read by ranges."""

    def __init__(self, store: FsspecStore, path: str) -> None:
        self._store = store
        self._path = path

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`; TruncatedError where it is shorter."""
        self._store.require(self._path, offset, length)
        parts = [(self._path, start, n) for start, n in split_parts(offset, length)]
        return b"".join(self._store.ranges(parts))

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`; TruncatedError where it is shorter."""
        view = view.cast("B")
        view[:] = self.read(offset, len(view))

    def close(self) -> None:
        """Release it; nothing is held open between reads."""


def _entry(path: str, info: Mapping[str, Any]) -> Entry:
    modified = info.get("mtime") or info.get("LastModified") or info.get("last_modified")
    etag = info.get("etag") or info.get("ETag")
    tier = str(info.get("archive_status") or info.get("blob_tier") or "")
    return Entry(
        path,
        int(info["size"]),
        _seconds(modified),
        etag=str(etag).strip('"') if etag else None,
        archived=tier.lower() == "archive",
    )


def _seconds(modified: datetime | str | float | None) -> float | None:
    from datetime import datetime

    if isinstance(modified, str):
        try:
            modified = datetime.fromisoformat(modified)
        except ValueError:
            return None
    return modified.timestamp() if isinstance(modified, datetime) else modified
