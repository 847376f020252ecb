"""Rename a local name onto a free one: an existing name is never replaced.

`rename` replaces a file, and an empty directory, which may be a save that has just begun. Linux
3.15 and later can refuse that; if the kernel or the filesystem cannot (NFS), the name is checked
first.
"""

from __future__ import annotations

import errno
import os
from functools import cache
from typing import TYPE_CHECKING

from .folders import status
from .oserror import twice

if TYPE_CHECKING:
    import ctypes

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
