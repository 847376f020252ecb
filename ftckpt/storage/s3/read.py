"""Read ranges of S3 objects: exactly the requested bytes, or an error."""

from __future__ import annotations

import re
from typing import Any

from ftckpt.errors import IncompleteError, TruncatedError, UnsupportedError
from ftckpt.storage.ranges import PART, split_parts
from ftckpt.storage.store import Reader

from .client import S3Client, gather
from .errors import status_of
from .object import S3Object

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class Version:
    """The ETag of the first answer; every later answer must have it too."""

    def __init__(self) -> None:
        self._etag: str | None = None

    def check(self, etag: str | None, at: S3Object) -> None:
        """Raise IncompleteError if the object was replaced between two ranges."""
        if self._etag is None:
            self._etag = etag
        elif etag != self._etag:
            raise IncompleteError(
                f"{at.url} was replaced while it was being read", kind="changed-file", file=at.path
            )


async def head_object(client: S3Client, at: S3Object, doing: str = "look up") -> dict[str, Any]:
    """Return the service's HEAD answer; `doing` is for the message of an error."""
    return await client.call(
        "head_object", url=at.url, file=at.path, doing=doing, Bucket=at.bucket, Key=at.key
    )


async def read_bytes(
    client: S3Client, at: S3Object, offset: int, length: int, version: Version
) -> memoryview:
    """Return `length` bytes at `offset` in new memory; raises as `read_range`."""
    if length > PART:
        # A damaged index can request any length; memory is reserved only for existing bytes.
        head = await head_object(client, at, "read")
        if offset + length > head["ContentLength"]:
            raise _truncated(at, offset, length)
    view = memoryview(bytearray(length))
    await read_range(client, at, offset, view, version)
    return view


async def read_range(
    client: S3Client, at: S3Object, offset: int, view: memoryview, version: Version
) -> None:
    """Fill `view` from `offset`, in concurrent parts if it is large.

    Raises:
        TruncatedError: the object ends before the range does.
        IncompleteError: the object was replaced between two parts.
        UnsupportedError: archived, or a service that does not answer ranges.
        NotFoundError, DeniedError, UnavailableError: see `S3Client.attempt`.
    """
    parts = split_parts(offset, len(view))
    await gather(
        *(
            _read_part(client, at, start, view[start - offset :][:length], version)
            for start, length in parts
        )
    )


async def _read_part(
    client: S3Client, at: S3Object, offset: int, view: memoryview, version: Version
) -> None:
    done = 0

    async def once(s3: Any) -> None:
        # A broken body continues where it broke; the ETag proves that it is the same object.
        nonlocal done
        first, last = offset + done, offset + len(view) - 1
        if not done and client.fast.takes(len(view)):
            try:
                body = await client.fast.begin(s3, at.bucket, at.key, first, last)
            except Exception:
                client.requests += 1  # the ordinary request says what is wrong
            else:
                try:
                    _check_range(body.range.said, at, first, last)
                    version.check(body.range.etag, at)
                    done = await body.fill(view)
                finally:
                    body.close_unread()
                client.bytes_read += done
                if done < len(view):
                    raise ConnectionError(f"the answer ended {len(view) - done} bytes early")
                return
        asked = {"Bucket": at.bucket, "Key": at.key, "Range": f"bytes={first}-{last}"}
        try:
            answer = await s3.get_object(**client.payer(asked))
        except Exception as error:
            if status_of(error) == 416:
                raise _truncated(at, offset, len(view)) from error
            raise
        async with answer["Body"] as body:
            _check_range(answer, at, first, last)
            version.check(answer.get("ETag"), at)
            while done < len(view):
                chunk = await body.read(min(1 << 20, len(view) - done))
                if not chunk:
                    raise ConnectionError(f"the answer ended {len(view) - done} bytes early")
                view[done : done + len(chunk)] = chunk
                done += len(chunk)
                client.bytes_read += len(chunk)

    await client.attempt(once, url=at.url, file=at.path, doing="read")


def _check_range(answer: dict[str, Any], at: S3Object, first: int, last: int) -> None:
    """Compare the range in the answer with the requested one."""
    match = _CONTENT_RANGE.fullmatch(answer.get("ContentRange") or "")
    if match is None:
        # A whole object may stand for a range that covers it; any other answer is not the range.
        if first == 0 and answer.get("ContentLength") == last + 1:
            return
        raise UnsupportedError(
            f"the service answers a range of {at.url} with something else; it cannot be read",
            file=at.path,
            offset=first,
            length=last - first + 1,
        )
    start, end = int(match[1]), int(match[2])
    total = None if match[3] == "*" else int(match[3])
    if start == first and end < last and total == end + 1:
        raise _truncated(at, first, last - first + 1)
    if (start, end) != (first, last):
        raise UnsupportedError(
            f"the service answers bytes {start}-{end} of {at.url} for bytes {first}-{last}",
            file=at.path,
            offset=first,
            length=last - first + 1,
        )


def _truncated(at: S3Object, offset: int, length: int) -> TruncatedError:
    return TruncatedError(
        f"{at.url} ends before the end of the range [{offset}, {offset + length})",
        file=at.path,
        offset=offset,
        length=length,
    )


class S3Reader(Reader):
    """One object, read by ranges that all belong to one version of it."""

    def __init__(self, client: S3Client, at: S3Object) -> None:
        self._client = client
        self._at = at
        self._version = Version()

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes at `offset`; TruncatedError if it is shorter."""
        return bytes(
            self._client.run(read_bytes(self._client, self._at, offset, length, self._version))
        )

    def readinto(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`; TruncatedError if it is shorter."""
        view = view.cast("B")
        self._client.run(read_range(self._client, self._at, offset, view, self._version))

    def close(self) -> None:
        """Release it; nothing is held open between reads."""
