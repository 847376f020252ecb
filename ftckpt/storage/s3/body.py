"""The bodies of parts: sent from memory without a copy, checked against a digest.

The signature of a request covers the SHA-256 of its body, and a service that compares the two
refuses a body that was damaged in transit. Most do; some that imitate S3 check neither. So ftckpt
probes the service with a deliberately damaged part. If it accepts that, the MD5 of every part is
compared with what it reports as stored: twice the work, and the only evidence then.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class PartBody(io.BytesIO):
    """A view as the file that botocore hashes and aiohttp sends; one for each attempt.

    aiohttp sends a BytesIO from the event loop and any other file through a thread, but copies the
    content of a real one to learn its length. The view must not change until the answer.
    """

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._at = 0

    def read(self, size: int | None = -1, /) -> Any:
        """Return a view of the next `size` bytes; of all that is left by default."""
        end = len(self._view) if size is None or size < 0 else self._at + size
        part = self._view[self._at : end]
        self._at += len(part)
        return part

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Go to a place and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._at

    def getbuffer(self) -> memoryview:
        """Return the bytes."""
        return self._view[:]


class Damaged(PartBody):
    """A body with one byte that differs between hashing and sending."""

    def __init__(self) -> None:
        super().__init__(memoryview(b"0"))

    def read(self, size: int | None = -1, /) -> Any:
        """Return bytes that do not match the digest."""
        part = super().read(size)
        if not part:
            self._view = memoryview(b"1")
        return part


async def unless_stalled(answer: Awaitable[T], body: PartBody, seconds: float) -> T:
    """Await the answer to a request while its body is being sent.

    aiohttp counts seconds without a byte only after the end of the body: it would wait forever for
    a service that stops reading but holds the connection.

    Args:
        answer: of the service.
        body: of the request; nothing else reads it.
        seconds: maximum time without progress in the body.

    Raises:
        TimeoutError: no progress and no answer for that long.
    """
    asked = asyncio.ensure_future(answer)
    quiet = 0
    try:
        while True:
            before = body.tell()
            await asyncio.wait([asked], timeout=seconds)
            if asked.done():
                return asked.result()
            quiet = quiet + 1 if body.tell() == before else 0
            # aiohttp holds the last bytes, and then applies that timeout itself.
            if quiet > (before == len(body.getbuffer())):
                raise TimeoutError(f"no more than {before:,} bytes were taken in {seconds:g} s")
    finally:
        asked.cancel()
