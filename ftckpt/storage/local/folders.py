"""Open local directories by their names in an open one, and never through a link."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ftckpt.errors import UnsafeError

from .oserror import twice
from .ownership import make_folder

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
