"""Local files, through the operating system."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import filterfalse, islice
from operator import methodcaller
from typing import TYPE_CHECKING, TypeVar

from ftckpt.errors import FtckptError, NotFoundError, TruncatedError, UnsafeError
from ftckpt.storage.store import Entry, EntryKind, Reader, Store, Traits, Usage
from ftckpt.workers.limits import processors

from .oserror import PASSING, translate, twice
from .pagecache import PoliteFile

if TYPE_CHECKING:
    from ftckpt.extents import Extent

    from .write_in_place import LocalUpload

T = TypeVar("T")

# A longer length is checked against the file before memory is reserved, because it may lie.
_CHECK_LENGTH = 64 << 10
_MAX_OFFSET = (1 << 63) - 1

# Looked up once: a directory can have many names.
_FILE = EntryKind.FILE

# Lone surrogates, except the bytes of a name that is not UTF-8 as Python carries them.
_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")


class LocalReader(Reader):
    """One open regular file; reads are positional, so threads may share it."""

    def __init__(self, fd: int, key: str, path: str, count: Callable[[int], None]) -> None:
        self._fd = fd
        self._count = count
        self._file = PoliteFile(fd)
        self._key = key
        self._path = path

    def __del__(self) -> None:
        self.close()

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`; TruncatedError if the file is shorter."""
        if length > _CHECK_LENGTH or offset + length > _MAX_OFFSET:
            size = os.fstat(self._fd).st_size
            if offset + length > size:
                raise self._truncated(offset, length, max(0, size - offset))
        buffer = bytearray(length)
        self.readinto(offset, memoryview(buffer))
        return bytes(buffer)

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`; TruncatedError if the file is shorter."""
        view = view.cast("B")
        if offset + len(view) > _MAX_OFFSET:
            raise self._truncated(offset, len(view), 0)
        done = 0
        retried = False
        while done < len(view):
            try:
                got = self._file.preadv(view[done:], offset + done)
            except OSError as error:
                # A disk or network may recover once; a second failure is final.
                if error.errno in PASSING and not retried:
                    retried = True
                    continue
                raise translate(error, self._path, "read", self._key) from error
            if got == 0:
                raise self._truncated(offset, len(view), done)
            done += got
        self._count(done)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def close(self) -> None:
        """Release it; reading afterwards is an error of the caller."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _truncated(self, offset: int, length: int, done: int) -> TruncatedError:
        return TruncatedError(
            f"{self._path} ends {length - done} bytes before the end of the range "
            f"[{offset}, {offset + length})",
            file=self._key,
            offset=offset,
            length=length,
        )


class LocalStore(Store):
    """A local directory or file."""

    def __init__(self, url: str) -> None:
        self.url = url
        path = url.removeprefix("file://") if url.startswith("file://") else url
        self._root = os.path.expanduser(path) or "."
        self._lock = threading.Lock()
        self._bytes_read = 0
        parallel = min(16, 2 * processors())
        self.traits = Traits(local=True, conditional_put=True, gap=64 << 10, parallel=parallel)

    def __reduce__(self) -> tuple[type[LocalStore], tuple[str]]:
        """Pickle as the URL."""
        return LocalStore, (self.url,)

    def usage(self) -> Usage:
        """Return the bytes read so far; there are no requests."""
        return Usage(0, self._bytes_read)

    def _count(self, amount: int) -> None:
        with self._lock:
            self._bytes_read += amount

    def local_path(self, path: str = "") -> str:
        """Return the local path.

        Raises:
            UnsafeError: a key that climbs, or that cannot be a file's name (`unsafe-path`).
        """
        if not path:
            return self._root
        if path.startswith("/") or ".." in path.split("/"):
            raise UnsafeError(f"{path!r} climbs out of {self.url}", kind="unsafe-path", file=path)
        if "\0" in path or _HALF.search(path):
            raise UnsafeError(f"{path!r} can be no file's name", kind="unsafe-path", file=path)
        return os.path.join(self._root, path)

    def stat(self, path: str) -> Entry:
        """Return the entry of one name; links to directories are DIRECTORY with `link` set."""
        full = self.local_path(path)
        try:
            found = twice(lambda: os.lstat(full))
            if stat.S_ISLNK(found.st_mode):
                return _linked(path, full)
        except OSError as error:
            raise translate(error, full, "look up", path) from error
        return _entry(path, found)

    def children(self, path: str = "") -> list[Entry]:
        """Return what lies directly below `path`, sorted by path."""
        full = self.local_path(path)
        return sorted(self._scan(full, path))

    def names(self, path: str = "", most: int | None = None) -> dict[str, EntryKind]:
        """Return the names directly below `path`, or the first `most`, sorted, with their kinds."""
        full = self.local_path(path)

        def scan() -> dict[str, EntryKind]:
            # A directory may have thousands of names, most of them files: C does the work for each.
            with os.scandir(full) as names:
                found = list(islice(names, most))
            kinds = dict.fromkeys(sorted([name.name for name in found]), _FILE)
            for name in filterfalse(_is_file, found):
                kinds[name.name] = _kind(name)
            return kinds

        try:
            return twice(scan)
        except OSError as error:
            raise translate(error, full, "list", path) from error

    def walk(self, path: str = "") -> list[Entry]:
        """Return every FILE and SPECIAL below `path`, sorted by path; enters no link."""
        found: list[Entry] = []
        waiting = [path]
        while waiting:
            here = waiting.pop()
            try:
                below = self._scan(self.local_path(here), here)
            except NotFoundError:
                if here == path:
                    raise
                continue  # removed during the walk
            for entry in below:
                if entry.kind is not EntryKind.DIRECTORY:
                    found.append(entry)
                elif entry.link is not None:
                    found.append(entry._replace(kind=EntryKind.SPECIAL))
                else:
                    waiting.append(entry.path)
        return sorted(found)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes at `offset`; None reads to the end of the file that was opened.

        Another may be renamed over it meanwhile, so it is not asked by its name how long it is.
        """
        with self.open(path) as reader:
            if length is None:
                length = max(0, os.fstat(reader.fileno()).st_size - offset)
            return reader.read(offset, length)

    def open(self, path: str) -> LocalReader:
        """Open one file for ranged reads; a fifo or device is refused and never blocks."""
        full = self.local_path(path)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        try:
            # Opening alone can act on a device, so its kind is checked before and after.
            _require_regular(twice(lambda: os.stat(full)), path, full)
            fd = twice(lambda: os.open(full, flags))
        except OSError as error:
            if isinstance(error, FtckptError):
                raise
            raise translate(error, full, "open", path) from error
        reader = LocalReader(fd, path, full, self._count)
        _require_regular(os.fstat(fd), path, full)
        return reader

    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order; each file is opened once."""
        result = [b""] * len(extents)
        order = sorted(range(len(extents)), key=lambda i: extents[i][:2])
        reader: LocalReader | None = None
        name = None
        try:
            for i in order:
                extent = extents[i]
                if reader is None or extent.file != name:
                    if reader is not None:
                        reader.close()
                    reader, name = self.open(extent.file), extent.file
                result[i] = reader.read(extent.offset, extent.length)
        finally:
            if reader is not None:
                reader.close()
        return result

    def put(self, path: str, data: bytes) -> None:
        """Store `data` under `path`, replacing an existing file, atomically and durably."""
        from .atomic import write_over

        write_over(self.local_path(path), data)

    def create(self, path: str, data: bytes) -> None:
        """Store `data` under `path`, which must not exist; exactly one of several racers wins."""
        from .atomic import write_new

        write_new(self.local_path(path), data)

    def upload(self, path: str, size: int) -> LocalUpload:
        """Open a file of `size` bytes for writing in place; its bytes so far are kept."""
        from .write_in_place import LocalUpload

        return LocalUpload(self.local_path(path), path, size)

    def delete(self, paths: Sequence[str]) -> Mapping[str, FtckptError | None]:
        """Delete names (a link itself, never its target); an absent one is gone.

        Nothing is deleted behind a link that stands in place of ftckpt's own folder.
        """
        return {path: self._delete(path) for path in paths}

    def _delete(self, path: str) -> FtckptError | None:
        from .atomic import require_own

        try:
            require_own(self.local_path(path))
            os.unlink(self.local_path(path))
        except FileNotFoundError:
            return None
        except FtckptError as error:
            return error
        except OSError as error:
            return translate(error, self.local_path(path), "delete", path)
        return None

    def _scan(self, full: str, path: str) -> list[Entry]:
        """Return the entries directly inside one directory, in no order."""
        prefix = f"{path}/" if path else ""

        def scan() -> list[Entry]:
            found: list[Entry] = []
            with os.scandir(full) as names:
                for name in names:
                    try:
                        if name.is_symlink():
                            found.append(_linked(prefix + name.name, name.path))
                        else:
                            status = name.stat(follow_symlinks=False)
                            found.append(_entry(prefix + name.name, status))
                    except FileNotFoundError:
                        continue  # removed during the listing
            return found

        try:
            return twice(scan)
        except OSError as error:
            raise translate(error, full, "list", path) from error


_is_file = methodcaller("is_file", follow_symlinks=False)


def _entry(path: str, found: os.stat_result, link: str | None = None) -> Entry:
    if stat.S_ISREG(found.st_mode):
        shared = None if found.st_nlink < 2 else (f"{found.st_dev}:{found.st_ino}", found.st_nlink)
        inode = (found.st_ino, found.st_ctime_ns)
        return Entry(path, found.st_size, found.st_mtime, _FILE, link, shared=shared, inode=inode)
    kind = EntryKind.DIRECTORY if stat.S_ISDIR(found.st_mode) else EntryKind.SPECIAL
    return Entry(path, 0, found.st_mtime, kind, link)


def _kind(name: os.DirEntry[str]) -> EntryKind:
    """Return the kind of a name that is not a plain file; of a link, its target's."""
    if name.is_dir(follow_symlinks=False):
        return EntryKind.DIRECTORY
    if not name.is_symlink():
        return EntryKind.SPECIAL
    try:
        return _linked(name.name, name.path).kind
    except FileNotFoundError:  # removed during the listing
        return EntryKind.SPECIAL


def _linked(path: str, full: str) -> Entry:
    """Return the entry of a symbolic link, with its target's kind and size."""
    link = os.readlink(full)
    try:
        return _entry(path, os.stat(full), link)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            mtime = os.lstat(full).st_mtime
            return Entry(path, 0, mtime, EntryKind.SPECIAL, link, dangling=True)
        raise


def _require_regular(found: os.stat_result, path: str, full: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise NotFoundError(f"{full} is a directory, not a file", file=path)
    if not stat.S_ISREG(found.st_mode):
        raise UnsafeError(f"{full} is not a regular file", kind="special-file", file=path)
