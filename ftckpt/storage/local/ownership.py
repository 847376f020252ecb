"""Whose a file is that ftckpt makes: what is around it says so, not who runs the command.

A root belongs to the user who trains there, and the superuser's cron runs gc in it. What the
superuser makes takes the owner, the group and the mode of the directory that it is made in, so that
the owner can go on. Only what was made just now is given away: a name that stood there may be
another file of the superuser's that somebody has moved into place.
"""

from __future__ import annotations

import os
import pwd
import stat
from contextlib import suppress

_DIRECTORY, _FILE = 0o2777, 0o666


def give(made: int, folder: os.stat_result) -> None:
    """Give a file or directory that was just made the owner, group and mode of its folder.

    Where another user than the superuser runs this, or the folder is the superuser's, or the
    filesystem has no owners, all stays as it is.

    Args:
        made: its open descriptor.
        folder: status of the directory that holds it.
    """
    if os.geteuid() != 0 or folder.st_uid == 0:
        return
    with suppress(OSError):
        mask = _DIRECTORY if stat.S_ISDIR(os.fstat(made).st_mode) else _FILE
        os.fchown(made, folder.st_uid, folder.st_gid)
        os.fchmod(made, stat.S_IMODE(folder.st_mode) & mask)


def is_believed(path: str, home: str) -> bool:
    """Say whether a record may speak for a root: its owner, the reader or the superuser wrote it.

    Others may be allowed to write where records lie, and not to change what they are about.

    Args:
        path: of the record.
        home: of the directory whose owner counts.
    """
    try:
        held = os.lstat(path)
        owners = (os.stat(home).st_uid, os.geteuid(), 0)
    except OSError:
        return False
    return stat.S_ISREG(held.st_mode) and held.st_uid in owners


def make_folder(name: str, *, dir_fd: int | None = None) -> None:
    """Make a directory, and give it away as `give` does.

    Raises:
        OSError: as `os.mkdir`.
    """
    if dir_fd is None:
        os.mkdir(name)
    else:
        os.mkdir(name, dir_fd=dir_fd)
    if os.geteuid() != 0:
        return
    with suppress(OSError):
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        made = os.open(name, flags, dir_fd=dir_fd)
        try:
            # Somebody who may write around it may have put another directory in its place.
            if not os.listdir(made):
                give(made, _around(name, dir_fd))
        finally:
            os.close(made)


def open_or_make(name: str, flags: int, *, dir_fd: int | None = None) -> int:
    """Open a file, and make it, as `give` does, where it is absent; return its descriptor.

    Raises:
        OSError: as `os.open`.
    """
    while True:
        with suppress(FileNotFoundError):
            return os.open(name, flags, dir_fd=dir_fd)
        try:
            made = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=dir_fd)
        except FileExistsError:  # another process has made it since
            continue
        give(made, _around(name, dir_fd))
        return made


def _around(name: str, dir_fd: int | None) -> os.stat_result:
    folder = os.path.dirname(name)
    if folder or dir_fd is None:
        return os.stat(folder or ".", dir_fd=dir_fd)
    return os.fstat(dir_fd)


def belongs_to(path: str) -> str:
    """Return which of the names of a path keeps this user out, and whose it is; "" if unknown.

    The last name that can be looked up is told: those below it are hidden by it.
    """
    found = ""
    at = ""
    for part in os.path.abspath(path).split("/"):
        at = f"{at}/{part}".replace("//", "/")
        try:
            status = os.lstat(at)
        except OSError:
            break
        try:
            owner = pwd.getpwuid(status.st_uid).pw_name
        except KeyError:
            owner = f"user {status.st_uid}"
        found = f"{at} belongs to {owner} (mode {stat.S_IMODE(status.st_mode):04o})"
    return found
