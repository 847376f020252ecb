"""Open local directories by their names in an open one, and never through a link.

Remove a local tree for good, through open directories.

Each directory is opened by its name in the one above, and never if it is a link, so that a link
that replaces a directory during the removal does not redirect it (as in CVE-2022-21658). Another
filesystem mounted in the tree is not entered.

Rename a local name onto a free one: an existing name is never replaced.

`rename` replaces a file, and an empty directory, which may be a save that has just begun. Linux
3.15 and later can refuse that; if the kernel or the filesystem cannot (NFS), the name is checked
first.

Swap two local names in one act: at every instant each stands for something whole.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING

from ftckpt.errors import FtckptError, UnsafeError, UnsupportedError

from .oserror import translate, twice
from .ownership import make_folder

if TYPE_CHECKING:
    import ctypes


FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def opened(name: str, folder: int, *, make: bool = False) -> Iterator[int]:
    """Open the directory `name` in the open directory `folder`; `make` it if it is absent.

    Raises:
        UnsafeError: it is a link, or not a directory.
        OSError: the system refused.
    """
    if make and status(name, folder) is None:
        with suppress(FileExistsError):
            twice(lambda: make_folder(name, dir_fd=folder))
    try:
        fd = twice(lambda: os.open(name, FLAGS, dir_fd=folder))
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise UnsafeError(
            f"{name} is a link or no directory: nothing is changed behind it",
            kind="special-file",
            file=name,
        ) from error
    try:
        yield fd
    finally:
        os.close(fd)


def status(name: str, folder: int) -> os.stat_result | None:
    """Return the status of a name in an open directory, of a link itself; None if absent."""
    try:
        return twice(lambda: os.stat(name, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return None


def is_file(name: str, folder: int) -> bool:
    """Whether a name in an open directory is a regular file, and not a link."""
    found = status(name, folder)
    return found is not None and stat.S_ISREG(found.st_mode)


# No checkpoint is as deep, and each level takes a descriptor.
_DEEPEST = 100


class Removal:
    """Removes trees, continuing after failures.

    Attributes:
        freed: bytes of removed files that had no other name.
        failed: errors by path.
    """

    def __init__(self) -> None:
        self.freed = 0
        self.failed: dict[str, FtckptError] = {}

    def remove(self, name: str, folder: int, path: str, depth: int = 0) -> None:
        """Remove a file, a link or a directory with its content; absent is removed.

        Args:
            name: to remove.
            folder: its open directory.
            path: its path for the user.
            depth: number of directories above it in the tree.
        """
        before = len(self.failed)
        try:
            twice(lambda: self._remove(name, folder, path, depth))
        except FileNotFoundError:
            return
        except FtckptError as error:
            self.failed[path] = error
        except OSError as error:
            # ENOTEMPTY matters only if nothing in the directory has failed.
            if error.errno != errno.ENOTEMPTY or len(self.failed) == before:
                self.failed[path] = translate(error, path, "remove", path)

    def _remove(self, name: str, folder: int, path: str, depth: int) -> None:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=folder)
            if stat.S_ISREG(found.st_mode) and found.st_nlink < 2:
                self.freed += found.st_size
            return
        if found.st_dev != os.fstat(folder).st_dev:
            raise OSError(errno.EXDEV, "another filesystem is mounted there")
        if depth == _DEEPEST:
            raise OSError(errno.ENAMETOOLONG, "it is nested too deeply")
        with opened(name, folder) as below:
            for one in sorted(os.listdir(below)):
                self.remove(one, below, f"{path}/{one}", depth + 1)
        os.rmdir(name, dir_fd=folder)


NO_REPLACE, EXCHANGE = 1, 2  # flags of Linux's renameat2(2)
CANNOT = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP})


def rename_new(source: str, target: str, *, source_dir: int, target_dir: int) -> None:
    """Rename a name of one open directory to a free name of another.

    Raises:
        FileExistsError: the name is taken, even by an empty directory or a dangling link.
        OSError: the system refused.
    """
    before = os.stat(source, dir_fd=source_dir, follow_symlinks=False)
    try:
        twice(lambda: _rename(source, target, source_dir, target_dir))
    except (FileExistsError, FileNotFoundError):
        # NFS repeats a request whose answer was lost, and then reports our own rename as another's.
        now = status(target, target_dir)
        ours = now is not None and os.path.samestat(before, now)
        if not ours or status(source, source_dir) is not None:
            raise


def _rename(source: str, target: str, source_dir: int, target_dir: int) -> None:
    code = renameat2(source_dir, source, target_dir, target)
    if code in CANNOT:
        if status(target, target_dir) is not None:
            code = errno.EEXIST
        else:
            os.rename(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir)
            return
    if code:
        raise OSError(code, os.strerror(code), source, None, target)


def renameat2(
    source_dir: int, source: str, target_dir: int, target: str, flag: int = NO_REPLACE
) -> int:
    """Return 0, or the number of the error."""
    import ctypes

    call = _system_call()
    if call is None:
        return errno.ENOSYS
    names = os.fsencode(source), os.fsencode(target)
    failed = call(source_dir, names[0], target_dir, names[1], flag)
    return ctypes.get_errno() if failed else 0


@cache
def _system_call() -> ctypes._NamedFuncPointer | None:
    import ctypes

    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = (
            *(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p),
            ctypes.c_uint,
        )
    return call


_HERE = -100  # AT_FDCWD: paths are used as they are


def exchange(one: str, other: str) -> None:
    """Swap two existing names.

    Raises:
        UnsupportedError: the system or the filesystem cannot do it in one act.
        OSError: the system refused.
    """
    code = renameat2(_HERE, one, _HERE, other, EXCHANGE)
    if code in CANNOT:
        raise UnsupportedError(f"the filesystem of {one} cannot swap two names in one act")
    if code:
        raise OSError(code, os.strerror(code), one)
