"""Swap two names of this machine in one act: at every instant each stands for something whole."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

from ftckpt.errors import UnsupportedError

_HERE = -100  # AT_FDCWD: paths are taken as they are
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux's renameat2(2)
_UNABLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


@cache
def _renameat2() -> Any:
    """Return Linux's `renameat2(fd, old, fd, new, flags)`, or None elsewhere."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None
    function.argtypes = (
        ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint,
    )  # fmt: skip
    return function


def exchange(one: str, other: str) -> None:
    """Give each of two existing names what the other stands for.

    Raises:
        UnsupportedError: the system or the filesystem cannot do it in one act.
        OSError: the system refused.
    """
    function = _renameat2()
    failed = errno.ENOSYS
    if function is not None:
        if not function(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE):
            return
        failed = ctypes.get_errno()
    if failed in _UNABLE:
        raise UnsupportedError(f"the filesystem of {one} cannot swap two names in one act")
    raise OSError(failed, os.strerror(failed), one)
