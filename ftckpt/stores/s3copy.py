"""Copy an S3 object at the service: no byte of it travels to us and back."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ftckpt.errors import FtckptError, NotFoundError, UnavailableError, UnsupportedError

from .s3client import S3Client, gather
from .s3read import S3Object, head_object

# One request copies 5 GiB at most, and is not answered before it has: smaller ones do not time out.
_LARGEST = 1 << 30
_PART = 256 << 20


async def copy_object(client: S3Client, source: S3Object, target: S3Object) -> None:
    """Store the content of one object under another key, and compare the size.

    Raises:
        UnsupportedError: the service does not copy parts of objects.
        UnavailableError: after retries, or the copy has another size.
        DeniedError, NoResourceError, NotFoundError: the service refused.
    """
    size = int((await head_object(client, source))["ContentLength"])
    if size <= _LARGEST:
        await _call(client, "copy_object", target, CopySource=_place(source))
    else:
        await _copy_parts(client, source, target, size)
    if (await head_object(client, target))["ContentLength"] != size:
        raise UnavailableError(
            f"{target.url} does not hold what was copied to it", file=target.path
        )


async def _copy_parts(client: S3Client, source: S3Object, target: S3Object, size: int) -> None:
    begun = await _call(client, "create_multipart_upload", target)
    upload = {"UploadId": begun["UploadId"]}

    async def copy(start: int) -> dict[str, Any]:
        number, last = start // _PART + 1, min(start + _PART, size) - 1
        answer = await _call(
            client, "upload_part_copy", target, CopySource=_place(source), PartNumber=number,
            CopySourceRange=f"bytes={start}-{last}", **upload,
        )  # fmt: skip
        etag = answer.get("CopyPartResult", {}).get("ETag")
        if etag is None:
            raise UnsupportedError(f"the service copies no part of {source.url}", file=source.path)
        return {"PartNumber": number, "ETag": etag}

    try:
        parts = await gather(*(copy(start) for start in range(0, size, _PART)))
        with suppress(NotFoundError):  # finished by an attempt whose answer was lost: it has a size
            await _call(
                client, "complete_multipart_upload", target, MultipartUpload={"Parts": parts},
                **upload,
            )  # fmt: skip
    except BaseException:
        with suppress(FtckptError):  # the error that brought us here matters more
            await _call(client, "abort_multipart_upload", target, **upload)
        raise


def _place(at: S3Object) -> dict[str, str]:
    return {"Bucket": at.bucket, "Key": at.key}


async def _call(client: S3Client, operation: str, at: S3Object, **more: Any) -> dict[str, Any]:
    return await client.call(
        operation, url=at.url, file=at.path, doing="copy to", **_place(at), **more
    )
