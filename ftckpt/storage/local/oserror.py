"""Map the operating system's errors to ftckpt's errors.

Claim an open file for one process by the system's own lock, which ends with the process.
"""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable
from typing import TypeVar

from ftckpt.errors import (
    DeniedError,
    ExistsError,
    FtckptError,
    NoResourceError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UnsafeError,
    UnsupportedError,
)

from .ownership import belongs_to

T = TypeVar("T")

# Errors that may pass after one failed call: a disk or a network filesystem recovers.
PASSING = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT})
# Errors of storage that is away, for any call.
AWAY = PASSING | {errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.EHOSTDOWN}
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_HANDLES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})


def translate(error: OSError, path: str, doing: str, file: str | None = None) -> FtckptError:
    """Return the ftckpt error for a system error.

    Args:
        error: as raised by a system call.
        path: the path as the user would type it.
        doing: the action, as in "cannot <doing> <path>".
        file: its key in the store, if known.
    """
    reason = error.strerror or str(error)
    message = f"cannot {doing} {path}: {reason}"
    code = error.errno
    if code in _ABSENT:
        return NotFoundError(f"{path} does not exist", file=file)
    if code in _DENIED:
        return DeniedError(message, hint=belongs_to(path), file=file)
    if code in _NO_SPACE:
        return NoResourceError(message, hint="free space or raise the quota", file=file)
    if code in _NO_HANDLES:
        return NoResourceError(message, hint="raise the limit (ulimit -n)", file=file)
    if code == errno.EEXIST:
        return ExistsError(f"{path} exists already", file=file)
    if code == errno.ELOOP:
        return UnsafeError(f"{path} is a loop of links", kind="special-file", file=file)
    if code == errno.EISDIR:
        return RefusedError(f"{path} is a directory, not a file", file=file)
    if code in (errno.ENAMETOOLONG, errno.EINVAL, errno.EOPNOTSUPP):
        return UnsupportedError(message, file=file)
    # The rest is storage: EIO, ESTALE, ETIMEDOUT, EREMOTEIO, ENODEV, ENXIO and the like.
    return UnavailableError(message, file=file)


def twice(call: Callable[[], T]) -> T:
    """Return `call()`, retried once if a disk or network may have recovered."""
    try:
        return call()
    except OSError as error:
        if error.errno not in PASSING:
            raise
        return call()


# NFS cannot lock what is not open for writing, such as a directory: EBADF.
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})


def claim(file: int, place: str, instead: str = "", *, shared: bool = False) -> None:
    """Lock an open file until it is closed, without waiting.

    Args:
        file: its descriptor; on NFS it must be open for writing.
        place: its name for messages.
        instead: the user's alternative on a filesystem without locks.
        shared: with others who share it; none of them has it alone.

    Raises:
        BlockingIOError: it is locked already.
        UnsupportedError: the filesystem has no locks.
        OSError: the system refused.
    """
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        twice(lambda: fcntl.flock(file, kind | fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise UnsupportedError(
            f"the filesystem of {place} has no locks, so two runs would not see another",
            hint=f"mount it with them (Lustre: -o flock){instead and ', or '}{instead}",
        ) from error
