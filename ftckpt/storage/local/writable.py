"""Whether a file that an option names can be written.

Find out whether a filesystem takes any more bytes.
"""

from __future__ import annotations

import errno
import os

from ftckpt.errors import UsageError


def check_file(option: str, path: str) -> None:
    """Refuse a file that cannot be written, before anything is computed.

    Missing directories above it are made when it is written, as `copy` and `convert` make
    those above a destination.

    Args:
        option: that names it, with its dashes.
        path: as typed.

    Raises:
        UsageError: it is a URL, or looks like one, or leads through a file.
    """
    if "://" in path:
        raise UsageError(f"{option} {path}: it is written on this machine", hint="name a path")
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        from ftckpt.storage.suggestions import existing, hint_for_slip

        there = existing(folder)
        slip = hint_for_slip(path)
        if slip or not os.path.isdir(there):
            wrong = folder if slip else there
            raise UsageError(
                f"{wrong} is not a directory, and {option} {path} goes there", hint=slip
            )


_FULL = {
    errno.ENOSPC: "no space is left on the device",
    errno.EDQUOT: "the quota is used up",
}
_CHUNK = 1 << 16


def full_because(path: str, nbytes: int) -> str:
    """Return in words why `nbytes` cannot be written below a directory; "" if they can.

    They are written to a file without a name, because a quota shows in no other way; it leaves
    nothing behind, however this process ends. Where the filesystem has no such files (NFS), the
    free blocks and inodes that it reports have to do.
    """
    try:
        file = os.open(path, getattr(os, "O_TMPFILE", 0) | os.O_WRONLY, 0o600)
    except OSError as error:
        return _FULL.get(error.errno or 0, "") or _reported(path, nbytes)
    try:
        for _ in range(0, nbytes, _CHUNK):
            os.write(file, bytes(_CHUNK))
        os.fsync(file)  # NFS and others find no room only here
    except OSError as error:
        return _FULL.get(error.errno or 0, "")
    finally:
        os.close(file)
    return ""


def _reported(path: str, nbytes: int) -> str:
    try:
        system = os.statvfs(path)
    except OSError:
        return ""
    if system.f_bavail * system.f_frsize < nbytes:
        return _FULL[errno.ENOSPC]
    return "no inode is left" if system.f_files and not system.f_favail else ""
