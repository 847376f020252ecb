"""Claim an open file for one process by the system's own lock, which ends with the process."""

from __future__ import annotations

import errno
import fcntl

from ftckpt.errors import UnsupportedError

from .oserror import twice

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
