"""Work on a full filesystem, which cannot even rename a file.

XFS needs a block for a directory that grows by a name, and refuses the rename without one. Files
can always be removed, and mode bits changed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

from ftckpt.retention.scan.contents import list_entry
from ftckpt.retention.scan.entry import ScannedEntry
from ftckpt.retention.scan.markers import marker_of
from ftckpt.storage.local.folders import opened, status
from ftckpt.storage.store import relative

# No trainer makes a directory with this mode.
_MARK = stat.S_ISVTX | stat.S_IRWXU
# It means nothing on a directory, and only its owner can set it.
_SIGNED = stat.S_ISUID


# A filesystem with less is full, whatever small reserve it keeps for itself.
_LITTLE = 1 << 20


def is_full(folder: int) -> bool:
    """Whether the filesystem of an open directory has no room left, for bytes or for names."""
    system = os.fstatvfs(folder)
    no_names = system.f_files > 0 and system.f_favail == 0
    return no_names or system.f_bavail * system.f_frsize < _LITTLE


def taken_apart(found: ScannedEntry, here: int) -> Iterator[None]:
    """Remove an entry of the root `here` file by file; yield after each, when there may be room.

    The commit marker goes first, so that nobody takes the rest for a checkpoint.

    Raises:
        FtckptError, OSError: it could not be listed, or a file not be removed.
    """
    store = found.root.store
    files = list_entry(store, found.place)
    marker = marker_of(store, found.child.part, files) if found.child is not None else None
    for file in sorted(files, key=lambda file: (file != marker, file.path)):
        _unlink(relative(found.root.base, file.path), here)
        yield


def _unlink(path: str, folder: int) -> None:
    *above, name = path.split("/")
    with ExitStack() as held:
        for each in above:
            folder = held.enter_context(opened(each, folder))
        os.unlink(name, dir_fd=folder)


def mark(name: str, folder: int) -> None:
    """Mark a directory that cannot be renamed as being freed; a file needs no mark."""
    found = status(name, folder)
    if found is not None and stat.S_ISDIR(found.st_mode):
        with opened(name, folder) as marked:
            os.fchmod(marked, _MARK)
            os.fsync(marked)


def is_marked(name: str, folder: int) -> bool:
    """Whether a name is a directory that is being freed."""
    found = status(name, folder)
    return (
        found is not None and stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == _MARK
    )


def sign(name: str, folder: int) -> None:
    """Sign a directory that was dropped beside its old name, so that purge knows whose act it was.

    A directory of somebody else stays unsigned; a file needs no sign.
    """
    _sign(name, folder, lambda mode: mode | _SIGNED)


def unsign(name: str, folder: int) -> None:
    """Take the sign off a directory that is restored."""
    _sign(name, folder, lambda mode: mode & ~_SIGNED)


def is_signed(found: os.stat_result) -> bool:
    """Whether a directory has the sign of `sign`, or of `mark`, which only its owner gives."""
    return bool(found.st_mode & _SIGNED) or stat.S_IMODE(found.st_mode) == _MARK


def _sign(name: str, folder: int, change: Callable[[int], int]) -> None:
    found = status(name, folder)
    if found is not None and stat.S_ISDIR(found.st_mode):
        with suppress(PermissionError), opened(name, folder) as signed:
            os.fchmod(signed, change(stat.S_IMODE(os.fstat(signed).st_mode)))
