"""Copy an S3 object inside the service, without transferring its bytes.

Read ranges of S3 objects: exactly the requested bytes, or an error.

Delete S3 objects, a thousand per request, and check the answer for each key.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ftckpt.errors import (
    DeniedError,
    FtckptError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    TruncatedError,
    UnavailableError,
    UnsupportedError,
)
from ftckpt.own_files import TEMPORARY
from ftckpt.storage.ranges import PART, split_parts
from ftckpt.storage.store import Reader

from .client import S3Client, S3Object, gather, status_of, translate

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


# One request copies at most 5 GiB and answers only at the end: smaller ones do not time out.
_LARGEST = 1 << 30
_PART = 256 << 20


async def copy_object(
    client: S3Client, source: S3Object, size: int, etag: str, target: S3Object
) -> None:
    """Store the content of one object under another key, and compare the size.

    Args:
        client: of the service that has both.
        source: the original.
        size: its bytes.
        etag: that it must have, quoted; "" if the service gives none.
        target: the copy.

    Raises:
        IncompleteError: the source was replaced meanwhile; the copy is invisible.
        UnsupportedError: the service does not copy parts of objects.
        UnavailableError: after retries, or the copy has another size.
        DeniedError, NoResourceError, NotFoundError: the service refused.
    """
    try:
        if size <= _LARGEST:
            await _call(client, "copy_object", target, **_of(source, etag))
        else:
            await _copy_parts(client, source, target, size, etag)
    except UnavailableError as error:
        if error.__cause__ is not None and status_of(error.__cause__) == 412:
            raise IncompleteError(
                f"{source.url} was replaced while it was being copied",
                kind="changed-file",
                file=source.path,
            ) from error
        raise
    if (await head_object(client, target))["ContentLength"] != size:
        raise UnavailableError(
            f"{target.url} does not hold what was copied to it", file=target.path
        )


async def _copy_parts(
    client: S3Client, source: S3Object, target: S3Object, size: int, etag: str
) -> None:
    begun = await _call(client, "create_multipart_upload", target)
    upload = {"UploadId": begun["UploadId"]}

    async def copy(start: int) -> dict[str, Any]:
        number, last = start // _PART + 1, min(start + _PART, size) - 1
        answer = await _call(
            client, "upload_part_copy", target, PartNumber=number,
            CopySourceRange=f"bytes={start}-{last}", **_of(source, etag), **upload,
        )  # fmt: skip
        copied = answer.get("CopyPartResult", {}).get("ETag")
        if copied is None:
            raise UnsupportedError(f"the service copies no part of {source.url}", file=source.path)
        return {"PartNumber": number, "ETag": copied}

    try:
        parts = await gather(*(copy(start) for start in range(0, size, _PART)))
        # Some services ignore conditions, and parts of two objects would be joined.
        version = Version()
        version.check(etag, source)
        version.check(str((await head_object(client, source)).get("ETag", "")), source)
        with suppress(NotFoundError):  # finished by an attempt whose answer was lost: it has a size
            await _call(
                client, "complete_multipart_upload", target, MultipartUpload={"Parts": parts},
                **upload,
            )  # fmt: skip
    except BaseException:
        with suppress(FtckptError):  # the original error matters more
            await _call(client, "abort_multipart_upload", target, **upload)
        raise


def _of(source: S3Object, etag: str) -> dict[str, Any]:
    """Return the parameters that copy an object only if it is unchanged."""
    return {"CopySource": _place(source)} | ({"CopySourceIfMatch": etag} if etag else {})


def _place(at: S3Object) -> dict[str, str]:
    return {"Bucket": at.bucket, "Key": at.key}


async def _call(client: S3Client, operation: str, at: S3Object, **more: Any) -> dict[str, Any]:
    return await client.call(
        operation, url=at.url, file=at.path, doing="copy to", **_place(at), **more
    )


_BATCH = 1000
_REFUSED = frozenset({"PreconditionFailed", "ConditionNotMet"})


class Doomed(NamedTuple):
    """An object to delete.

    Attributes:
        at: the key.
        version: one version of it, gone for good; "" for the current one, which a bucket with
            versions keeps.
        etag: delete only an object with this ETag; "" for any.
    """

    at: S3Object
    version: str = ""
    etag: str = ""


async def delete_objects(client: S3Client, targets: Sequence[Doomed]) -> list[FtckptError | None]:
    """Delete objects and return for each, in order, None or its error."""
    batches = [targets[i : i + _BATCH] for i in range(0, len(targets), _BATCH)]
    answers = await gather(*(_delete_batch(client, batch) for batch in batches))
    return [answer for batch in answers for answer in batch]


async def honours_conditions(client: S3Client, probe: S3Object) -> bool:
    """Whether the service deletes by ETag: refuses the wrong one and accepts the right one.

    It writes and deletes two empty keys that begin with `probe`.
    """
    stem = f"{probe.key}/{TEMPORARY}probe-{secrets.token_hex(8)}"
    wrong, right = probe._replace(key=f"{stem}-1"), probe._replace(key=f"{stem}-2")
    try:
        etags = [await _put_empty(client, at) for at in (wrong, right)]
        asked = [
            Doomed(wrong, etag='"00000000000000000000000000000000"'),
            Doomed(right, "", etags[1]),
        ]
        refused, taken = await delete_objects(client, asked)
        return isinstance(refused, RefusedError) and taken is None
    finally:
        await delete_objects(client, [Doomed(wrong), Doomed(right)])


async def still_there(client: S3Client, target: Doomed) -> FtckptError | None:
    """Return None if a key shows the wanted ETag or nothing, else why it must not be deleted.

    For services that delete without conditions: a short race with the deletion remains.
    """
    try:
        head = await head_object(client, target.at)
    except NotFoundError:
        return None
    except FtckptError as error:
        return error
    if str(head.get("ETag", "")).strip('"') == target.etag.strip('"'):
        return None
    return replaced(target.at)


def replaced(at: S3Object) -> RefusedError:
    """Return the error for a key that holds another object than the one to delete."""
    return RefusedError(
        f"{at.url} was replaced since it was listed, and is not deleted",
        kind="changed-file",
        file=at.path,
    )


async def _put_empty(client: S3Client, at: S3Object) -> str:
    answer = await client.call(
        "put_object",
        url=at.url,
        file=at.path,
        doing="write",
        Bucket=at.bucket,
        Key=at.key,
        Body=b"",
    )
    return str(answer["ETag"])


async def _delete_batch(client: S3Client, batch: Sequence[Doomed]) -> Sequence[FtckptError | None]:
    first = batch[0].at
    try:
        answer = await client.call(
            "delete_objects",
            url=first.url,
            file=first.path,
            doing="delete",
            Bucket=first.bucket,
            Delete={"Objects": [_asked(target) for target in batch], "Quiet": False},
        )
    except UnsupportedError:
        return await gather(*(_delete_one(client, target) for target in batch))
    except FtckptError as error:
        return [error] * len(batch)
    gone = {_named(item) for item in answer.get("Deleted", ())}
    errors = {_named(item): item for item in answer.get("Errors", ())}
    return [
        _outcome(at, (at.key, version) in gone, errors.get((at.key, version)))
        for at, version, _ in batch
    ]


def _asked(target: Doomed) -> dict[str, str]:
    asked = {"Key": target.at.key}
    if target.version:
        asked["VersionId"] = target.version
    if target.etag:
        asked["ETag"] = target.etag
    return asked


def _named(item: dict[str, Any]) -> tuple[str, str]:
    return item["Key"], item.get("VersionId") or ""


def _outcome(at: S3Object, gone: bool, refusal: dict[str, Any] | None) -> FtckptError | None:
    if refusal is None:
        if gone:
            return None
        return UnavailableError(f"the service did not say whether {at.url} is gone", file=at.path)
    code = refusal.get("Code", "")
    if code in ("NoSuchKey", "NoSuchVersion"):
        return None
    if code in _REFUSED:
        return replaced(at)
    if code == "AccessDenied":
        said = refusal.get("Message") or code
        hint = "check the bucket's policy, and whether the object is locked"
        return DeniedError(f"cannot delete {at.url}: {said}", hint=hint, file=at.path)
    from botocore.exceptions import ClientError

    status = {"MethodNotAllowed": 405, "NotImplemented": 501}.get(code, 500)
    response: Any = {"Error": refusal, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate(ClientError(response, "DeleteObjects"), at.url, at.path, "delete")


async def _delete_one(client: S3Client, target: Doomed) -> FtckptError | None:
    at, version, _ = target
    asked = {"Bucket": at.bucket, "Key": at.key}
    if version:
        asked["VersionId"] = version
    try:
        await client.call("delete_object", url=at.url, file=at.path, doing="delete", **asked)
    except NotFoundError:
        return None
    except FtckptError as error:
        return error
    return None
