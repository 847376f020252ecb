"""Memory that a thread lends to one piece of work at a time, and gets back.

Fresh memory costs as much as decoding into it, because the kernel clears every page. A fixed place
for each purpose (`ftckpt.workers.buffers`) does not do where a piece of work may begin another of
its kind before it ends: a base may be a delta that is decoded in the same thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Lend = Callable[[int], memoryview]
_thread = threading.local()


@contextmanager
def lender() -> Iterator[Lend]:
    """Lend as many bytes as asked for, again and again; all go back when the block ends.

    What a thread keeps is the most that was lent at one time.
    """
    spare: list[bytearray] = _thread.__dict__.setdefault("spare", [])
    lent: list[bytearray] = []

    def lend(nbytes: int) -> memoryview:
        held = spare.pop() if spare else bytearray()
        if len(held) < nbytes:
            held = bytearray(nbytes)
        lent.append(held)
        return memoryview(held)[:nbytes]

    try:
        yield lend
    finally:
        spare.extend(lent)
