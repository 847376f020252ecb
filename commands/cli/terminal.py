"""Writing to the streams of this process: terminals, pipes that close, disks that are full."""

from __future__ import annotations

import os
import re
import sys
from typing import IO

from ftckpt.errors import NoResourceError


class ClosedPipeError(BaseException):
    """The reader of our output has gone; not an Exception, so that no handler takes it for one."""


def is_terminal(stream: IO[str] | None) -> bool:
    """Say whether a stream is a terminal that understands control sequences."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


# What the eye looks for: what kind of line it is, headings, and entries that need a look.
_WORDS = (
    r"(?m)^(?P<red>ftckpt|error)(?=: )|^(?P<yellow>warning)(?=: )|^(?P<green>ok)(?=: )"
    r"|^(?P<cyan>hint|note)(?=: )|^(?P<bold>\S.*)(?=\n-+(?:  -+)+$)"
    r"|(?<=  )(?:(?P<bad>CORRUPT|UNSAFE|MISSING)|(?P<open>STAGING|ABANDONED))(?=  |$)"
)
_CODES = {"red": 31, "bad": 31, "yellow": 33, "open": 33, "green": 32, "cyan": 36, "bold": 1}


def coloured(stream: IO[str] | None, text: str) -> str:
    """Return text with colours for the eye, where the stream is a terminal that may show them."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return re.sub(
        _WORDS, lambda found: f"\x1b[{_CODES[str(found.lastgroup)]}m{found[0]}\x1b[0m", text
    )


def same_place(one: IO[str] | None, other: IO[str] | None) -> bool:
    """Say whether two streams go to the same terminal, file or pipe."""
    if one is None or other is None:
        return False
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError):  # streams that are no files
        return False


def write(stream: IO[str] | None, text: str) -> None:
    """Write and flush text.

    Raises:
        ClosedPipeError: nobody reads any more.
        NoResourceError: stdout goes to a full disk.
    """
    if stream is None:  # closed by the process that started us (`>&-`)
        return
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        unwritable(stream, error)


def write_bytes(stream: IO[str] | None, data: bytes) -> None:
    """Write bytes as they are and flush: a path must reach the shell unchanged.

    Raises:
        ClosedPipeError, NoResourceError: as `write`.
    """
    if stream is None:
        return
    try:
        stream.flush()
        stream.buffer.write(data)  # type: ignore[attr-defined]
        stream.buffer.flush()  # type: ignore[attr-defined]
    except OSError as error:
        unwritable(stream, error)


def unwritable(stream: IO[str], error: OSError) -> None:
    """Raise what a failed write means, and drop what the stream still holds.

    Raises:
        ClosedPipeError: nobody reads any more.
        NoResourceError: stdout cannot take it.

    Remarks that do not fit on a disk are lost silently: nothing is left to write them to.

    What stays in the buffer would fail again at interpreter shutdown, with a message and a code of
    the interpreter's own; so the descriptor is turned to the null device first.
    """
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass
    if isinstance(error, BrokenPipeError):
        raise ClosedPipeError from error
    if stream is sys.stderr:
        return
    raise NoResourceError(
        f"cannot write to standard output: {error.strerror or error}",
        hint="the output goes to a full or failing device",
    ) from error
