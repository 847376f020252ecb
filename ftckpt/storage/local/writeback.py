"""Start writing dirty pages early, so that the final flush finds little to do.

Without it the pages of a large file gather until `fsync`, and disk and processor take turns: 2 GiB
took 0.73 to 0.99 s to write and flush, and 0.53 s with it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

STEP = 8 << 20
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start, do not wait


@cache
def _sync_file_range() -> Any:
    """Return Linux's `sync_file_range(fd, offset, length, flags)`, or None elsewhere."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def begin(fd: int, offset: int, length: int) -> None:
    """Start writing back the last write (`length` bytes at `offset`), a `STEP` at a time.

    A hint: readers see no change, and its failure means nothing. `fd` is open for writing.
    """
    end = (offset + length) // STEP * STEP
    start = offset // STEP * STEP
    function = _sync_file_range()
    if end > start and function is not None:
        function(fd, start, end - start, _WRITE)
