"""What the kernel says of the filesystem that a file lies in."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

# Of filesystems whose files have no other place than memory: tmpfs and ramfs (statfs(2)).
_IN_MEMORY = (0x01021994, 0x858458F6)
_STATFS = 256  # bytes, more than the structure has; the magic number is the first word of it


def in_memory(fd: int) -> bool:
    """Say whether a file has no other place than memory, as far as is known."""
    function = _fstatfs()
    if function is None:
        return False
    answer = ctypes.create_string_buffer(_STATFS)
    return not function(fd, answer) and ctypes.c_long.from_buffer(answer).value in _IN_MEMORY


@cache
def _fstatfs() -> Any:
    """Return Linux's `fstatfs(fd, buffer)`, or None elsewhere: others fill longer structures."""
    if sys.platform != "linux":
        return None
    try:
        function = ctypes.CDLL(None).fstatfs
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_char_p)
    return function
