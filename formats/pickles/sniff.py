"""Bytes that are no archive: are they a pickle, and what would it call?

`torch.load` gives all but zips and tars to the unpickler, and a pickle acts while it is
read: the first call has happened when the rest turns out to be damaged. So what may be a pickle is
looked at as one before it is called damaged.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from ftckpt.errors import FtckptError, UnsafeError
from ftckpt.extents import Read

from .inert import RefusedCallError
from .keys import NoRoomError, check_keys
from .unpickle import BUILTINS, load

# Every protocol since 2 has a mark; before, a pickle begins with any opcode.
_MARKED = rb"\x80[\x02-\x05]"
_FIRST, _MOST, _GROWTH = 256 << 10, 256 << 20, 8


def refuse_hostile(read: Read, size: int, *, file: str, base: int = 0) -> None:
    """Refuse bytes that run something when they are unpickled; return where they are harmless.

    Damage is not reported here: the caller, who expected something else, does it.

    Args:
        read: returns `length` bytes at `offset`.
        size: number of bytes.
        file: their file, for messages.
        base: where they begin in it.

    Raises:
        UnsafeError: a pickle that calls what no checkpoint needs, or is hostile in another way
            (`unsafe-pickle`).
    """
    length = min(size, _FIRST)
    while True:
        data = read(0, length)
        marked = re.match(_MARKED, data) is not None
        try:
            try:
                end, stopped, *_ = check_keys(data)
            except NoRoomError as error:
                end, stopped = error.at, True  # what stands before it acts first
            if not stopped and end == length < min(size, _MOST):
                length = min(length * _GROWTH, size, _MOST)  # it goes on behind what was read
                continue
            load(data[:end], file=file, table=BUILTINS, persistent=_nothing, offset=base)
        except RefusedCallError as error:
            error.file, error.offset = file, base
            raise
        except UnsafeError as error:
            if marked:  # noise without the mark of a pickle does anything
                error.file = error.file or file
                raise
        except FtckptError:
            pass
        return


_depth = threading.local()
_DEEPEST = 3


def refuse_inside(data: bytes) -> None:
    """Refuse bytes in a checkpoint that are a hostile pickle themselves.

    Transformer Engine keeps its extra state as a `BytesIO` of such bytes, and unpickles it.

    Raises:
        UnsafeError: they call what no checkpoint needs, or nest too deep (`unsafe-pickle`).
    """
    from ftckpt.formats.torch_files.stream import parse_stream

    depth = getattr(_depth, "now", 0)
    if depth == _DEEPEST:
        raise UnsafeError("pickles are nested in one another too deep", kind="unsafe-pickle")

    def read(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    _depth.now = depth + 1
    try:
        parse_stream(read, len(data), file="bytes inside a pickle")
    except RefusedCallError as error:
        error.file = error.offset = error.length = None
        raise
    except FtckptError:  # they only look like a pickle
        return
    finally:
        _depth.now = depth


def _nothing(pid: Any) -> None:
    return None
