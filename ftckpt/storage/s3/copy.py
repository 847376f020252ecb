"""Copy an S3 object inside the service, without transferring its bytes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ftckpt.errors import (
    FtckptError,
    IncompleteError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)

from .client import S3Client, gather
from .errors import status_of
from .object import S3Object
from .read import Version, head_object

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
