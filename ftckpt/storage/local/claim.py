"""Claims an open file for one process by the system's own lock, which ends with the process."""

from __future__ import annotations

import errno
import fcntl

from ftckpt.errors import UnsupportedError

from .oserror import twice

# NFS has no lock for what was not opened to be written, such as a directory: EBADF.
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF})


def claim(file: int, place: str, instead: str = "") -> None:
    """Lock an open file until it is closed, without waiting.

    Args:
        file: its descriptor; a file on NFS has to be open for writing.
        place: what is locked, for messages.
        instead: what else the user can do where the filesystem has no locks.

    Raises:
        BlockingIOError: it is locked already.
        UnsupportedError: the filesystem has no locks.
        OSError: the system refused.
    """
    try:
        twice(lambda: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise UnsupportedError(
            f"the filesystem of {place} has no locks, so two runs would not see another",
            hint=f"mount it with them (Lustre: -o flock){instead and ', or '}{instead}",
        ) from error
