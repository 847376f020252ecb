"""Read large files without changing the content of the page cache.

A verification reads terabytes on a trainer's machine. Plain reads would push the trainer's data out
of the page cache; POSIX_FADV_DONTNEED afterwards would also drop what was cached before. So pages
that were cached stay, and pages that only our reading brought in go:

- Linux 6.16 and later: RWF_DONTCACHE is exactly this (6.14 and 6.15 had defects in it). Measured on
  ext4: no page lost, none gained, cached pages as fast as by plain reads.
- Earlier, and if the filesystem refuses it, the reader checks before each read what is cached, and
  drops the rest: cachestat says whether all of it is (Linux 6.5), mincore which pages are, for a
  mapping and unmapping that slows every thread of the process. RWF_NOWAIT cannot tell: since Linux
  5.9 it starts the very read-ahead whose pages the next such read then finds.
- A tmpfs refuses both flags, and its pages lie nowhere else: reads are plain.
- Outside Linux reads are plain: nothing there tells or drops single pages.

Small reads are plain: headers and indexes are worth keeping, and small records of one page would be
read again and again. Folios of the page cache may be larger than a page, so large sequential reads
are best cut at multiples of 128 KiB of the file: cut elsewhere they were half as fast cold.

Start writing dirty pages early, so that the final flush finds little to do.

Without it the pages of a large file gather until `fsync`, and disk and processor take turns: 2 GiB
took 0.73 to 0.99 s to write and flush, and 0.53 s with it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from functools import cache, lru_cache
from typing import Any

SMALL = 128 << 10
_PAGE = mmap.PAGESIZE
_RWF_DONTCACHE = 0x80
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL)
_LOW_BIT = bytes(b & 1 for b in range(256))
# The number of the call on the machines that share one number for it.
_CACHESTAT = 451
# Filesystems whose files lie only in memory: tmpfs and ramfs (statfs(2)).
_IN_MEMORY = (0x01021994, 0x858458F6)
_STATFS = 256  # bytes, more than the structure has; its first word is the magic number


class PoliteFile:
    """Reads of one open file that leave the page cache as it was."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._uncached = _has_dontcache()
        self._random = False
        self._plain = sys.platform != "linux"

    def preadv(self, view: memoryview, offset: int) -> int:
        """Read up to `len(view)` bytes at `offset` into `view`; return their number, 0 at the end.

        Raises:
            OSError: as `os.preadv`.
        """
        if len(view) < SMALL or self._plain:
            return os.preadv(self.fd, [view], offset)
        if self._uncached:
            try:
                return os.preadv(self.fd, [view], offset, _RWF_DONTCACHE)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                self._uncached = False
        if not self._random:
            self._plain = in_memory(self.fd)
            if self._plain:
                return os.preadv(self.fd, [view], offset)
            # Otherwise read-ahead brings in pages that the next read would take for the trainer's.
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
            self._random = True
        return self._read_and_drop(view, offset)

    def _read_and_drop(self, view: memoryview, offset: int) -> int:
        if is_cached(self.fd, offset, len(view)):
            return os.preadv(self.fd, [view], offset)
        absent = _absent_runs(self.fd, offset, len(view))
        got = os.preadv(self.fd, [view], offset)
        for start, length in absent:
            os.posix_fadvise(self.fd, start, length, os.POSIX_FADV_DONTNEED)
        return got


def reads_uncached(fd: int) -> bool:
    """Say whether reads of an open file can leave no pages behind by themselves."""
    if not _has_dontcache():
        return False
    try:
        os.preadv(fd, [bytearray(1)], 0, _RWF_DONTCACHE)
    except OSError:
        return False
    return True


def read_cached(fd: int, offset: int, view: memoryview) -> bool:
    """Fill `view` with bytes of an open file if all of them are known to be in memory.

    Returns whether it did. Before Linux 6.5 only a filesystem in memory is known.
    """
    if not in_memory(fd) and not is_cached(fd, offset, len(view)):
        return False
    try:
        return os.preadv(fd, [view], offset) == len(view)
    except OSError:
        return False


@lru_cache(maxsize=1)
def _has_dontcache() -> bool:
    if sys.platform != "linux":  # others count their releases otherwise
        return False
    major, minor = (int("".join(filter(str.isdigit, p)) or 0) for p in _release()[:2])
    return (major, minor) >= (6, 16)


def _release() -> list[str]:
    return [*os.uname().release.split("."), "0"]


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    return libc


def is_cached(fd: int, offset: int, length: int) -> bool:
    """Whether every page of a range is known to be cached; needs Linux 6.5."""
    if sys.platform != "linux":  # the call's number is another call's there
        return False
    cached = _cachestat(fd, offset, length)
    first = offset // _PAGE
    return cached is not None and cached >= -(-(offset + length) // _PAGE) - first


def _cachestat(fd: int, offset: int, length: int) -> int | None:
    """Return the number of cached pages of a range; on failure None, and sets `errno`."""
    asked = (ctypes.c_uint64 * 2)(offset, length)
    answer = (ctypes.c_uint64 * 5)()
    failed = _libc().syscall(ctypes.c_long(_CACHESTAT), fd, asked, answer, 0)
    return None if failed else answer[0]


def resident_pages(fd: int, offset: int, length: int) -> bytes:
    """Return a byte 1 for each page of the range that is cached, and 0 for the others.

    `offset` must be a multiple of the page size. The pages are mapped and never touched, so a
    truncated file cannot fault. If the system does not tell (a file of another owner that we cannot
    write), every page counts as cached.
    """
    libc = _libc()
    pages = -(-length // _PAGE)
    address = libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address in (None, ctypes.c_void_p(-1).value):
        return b"\1" * pages
    try:
        answer = ctypes.create_string_buffer(pages)
        if libc.mincore(address, length, answer):
            return b"\1" * pages
        return answer.raw.translate(_LOW_BIT)
    finally:
        libc.munmap(address, length)


def _absent_runs(fd: int, offset: int, length: int) -> list[tuple[int, int]]:
    """Return (offset, length) of the runs of uncached whole pages around the range."""
    first = offset - offset % _PAGE
    pages = resident_pages(fd, first, offset + length - first)
    runs: list[tuple[int, int]] = []
    start = pages.find(0)
    while start >= 0:
        end = pages.find(1, start)
        end = len(pages) if end < 0 else end
        runs.append((first + start * _PAGE, (end - start) * _PAGE))
        start = pages.find(0, end)
    return runs


def in_memory(fd: int) -> bool:
    """Whether a file is known to lie only in memory."""
    function = _fstatfs()
    if function is None:
        return False
    answer = ctypes.create_string_buffer(_STATFS)
    return not function(fd, answer) and ctypes.c_long.from_buffer(answer).value in _IN_MEMORY


@cache
def _fstatfs() -> Any:
    """Return Linux's `fstatfs(fd, buffer)`; None elsewhere: others fill longer structures."""
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None).fstatfs
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_char_p)
    return function


STEP = 8 << 20
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start, do not wait


@cache
def _sync_file_range() -> Any:
    """Return Linux's `sync_file_range(fd, offset, length, flags)`, or None elsewhere."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def begin(fd: int, offset: int, length: int) -> None:
    """Start writing back the last write (`length` bytes at `offset`), a `STEP` at a time.

    A hint: readers see no change, and its failure means nothing. `fd` is open for writing.
    """
    end = (offset + length) // STEP * STEP
    start = offset // STEP * STEP
    function = _sync_file_range()
    if end > start and function is not None:
        function(fd, start, end - start, _WRITE)
