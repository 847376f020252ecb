"""`ftckpt __complete`: words that only a look at a place can tell; the shells' scripts call it.

A shell that waits for TAB must not hang, and must get neither an error nor half an answer. So a
child looks and this process waits for at most `DEADLINE`. A child that is later than that writes
its answer to a cache (`cache`), and the next TAB finds it there.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

# Of the 0.3 seconds that a user notices, the interpreter has taken some.
DEADLINE = 0.22
# A child that nobody waits for any more ends by then.
_LAST = 10


def main(arguments: Sequence[str]) -> NoReturn:
    """Print the answer and end with 0; nothing where there is none in time."""
    began = time.monotonic()
    with suppress(Exception):
        os.write(1, ask(arguments, began))
    os._exit(0)


def ask(arguments: Sequence[str], began: float) -> bytes:
    """Return the answer of a child; b"" where it fails or is late.

    Args:
        arguments: what the shell's script has passed, after `__complete`.
        began: when TAB was pressed, by the monotonic clock.
    """
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.close(read)
            _look(arguments, write, began)
        finally:
            os._exit(0)
    os.close(write)
    found = bytearray()
    while (left := began + DEADLINE - time.monotonic()) > 0:
        if not select.select([read], [], [], left)[0]:
            break
        piece = os.read(read, 1 << 16)
        if not piece:
            return bytes(found)
        found += piece
    return b""


def _look(arguments: Sequence[str], write: int, began: float) -> None:
    """Find the answer in the child: out of the terminal's sight, and not for ever."""
    os.setsid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LAST)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    from .answer import answer

    data = answer(arguments, began + DEADLINE).encode()
    while data:
        data = data[os.write(write, data) :]
