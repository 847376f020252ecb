"""List what a plain S3 listing hides and the bill shows: versions, unfinished uploads."""

from __future__ import annotations

import os.path
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ftckpt.errors import FtckptError, NotFoundError, UnavailableError, UnsupportedError
from ftckpt.storage.store import Entry, Unfinished

from .client import S3Client, S3Object, gather
from .copy import head_object

# The version name of each object in a bucket without, or with suspended, versioning.
_NO_VERSION = "null"


async def list_versions(client: S3Client, files: Sequence[S3Object]) -> list[Entry]:
    """Return every version and deletion of some keys; empty if the bucket keeps none.

    The first object shows whether it does, because asking the bucket needs another permission.
    """
    first = files[0]
    head = await head_object(client, first)
    if head.get("VersionId", _NO_VERSION) == _NO_VERSION:
        return []
    wanted = {at.key: at.path for at in files}
    found = []
    # By characters: of a file and the manifest beside it, of a directory with its slash.
    below = first._replace(key=os.path.commonprefix(list(wanted)))  # noqa: RUF071
    async for page in _pages(client, "list_object_versions", below, "versions", _AFTER_VERSION):
        for item in (*page.get("Versions", ()), *page.get("DeleteMarkers", ())):
            if item["Key"] in wanted:
                found.append(_version(wanted[item["Key"]], item))
    return sorted(found, key=lambda e: (e.path, e.mtime or 0.0))


async def list_unfinished(client: S3Client, below: S3Object) -> list[Unfinished]:
    """Return the multipart uploads below a prefix that were neither completed nor aborted."""
    base = f"{below.key}/" if below.key else ""
    prefix = f"{below.path}/" if below.path else ""
    found = []
    pages = _pages(
        client, "list_multipart_uploads", below._replace(key=base), "uploads", _AFTER_UPLOAD
    )
    try:
        async for page in pages:
            for item in page.get("Uploads", ()):
                path = prefix + item["Key"][len(base) :]
                found.append(Unfinished(path, item["UploadId"], item["Initiated"].timestamp()))
    except NotFoundError:  # rclone's answer for a bucket that has never had any
        return []
    return sorted(found)


async def last_part(client: S3Client, at: S3Object, upload: str) -> float | None:
    """Return when the last part of an upload arrived; None where none did, or it is gone.

    Raises:
        UnsupportedError: the service does not say when.
        UnavailableError: its parts are not all listed.
    """
    newest: float | None = None
    asked: dict[str, Any] = {"Bucket": at.bucket, "Key": at.key, "UploadId": upload}
    while True:
        try:
            page = await client.call(
                "list_parts", url=at.url, file=at.path, doing="list the parts of", **asked
            )
        except NotFoundError:
            return None
        for part in page.get("Parts", ()):
            if part.get("LastModified") is None:
                raise UnsupportedError(f"the service does not say when parts of {at.url} arrived")
            newest = max(newest or 0.0, part["LastModified"].timestamp())
        if not page.get("IsTruncated"):
            return newest
        last = int(page.get("NextPartNumberMarker") or 0)
        if last <= asked.get("PartNumberMarker", 0):
            raise UnavailableError(
                f"the parts of {at.url} are listed in part, without a way to go on", file=at.path
            )
        asked["PartNumberMarker"] = last


async def abort_uploads(
    client: S3Client, uploads: Sequence[tuple[S3Object, str]]
) -> list[FtckptError | None]:
    """Abort uploads by key and id; for each, in order, None when it is gone."""

    async def abort(at: S3Object, upload: str) -> FtckptError | None:
        try:
            await client.call(
                "abort_multipart_upload",
                url=at.url,
                file=at.path,
                doing="abort an upload of",
                Bucket=at.bucket,
                Key=at.key,
                UploadId=upload,
            )
        except NotFoundError:
            return None
        except FtckptError as error:
            return error
        return None

    return await gather(*(abort(at, upload) for at, upload in uploads))


_AFTER_VERSION = {"NextKeyMarker": "KeyMarker", "NextVersionIdMarker": "VersionIdMarker"}
_AFTER_UPLOAD = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}


async def _pages(
    client: S3Client, operation: str, below: S3Object, what: str, after: dict[str, str]
) -> AsyncIterator[dict[str, Any]]:
    """Yield the pages of a complete listing, or raise."""
    asked: dict[str, str] = {"Bucket": below.bucket, "Prefix": below.key}
    while True:
        page = await client.call(
            operation, url=below.url, file=below.path, doing=f"list the {what} of", **asked
        )
        yield page
        if not page.get("IsTruncated"):
            return
        going_on = {ask: page[said] for said, ask in after.items() if page.get(said)}
        if not going_on or going_on.items() <= asked.items():
            raise UnavailableError(
                f"the {what} of {below.url} are listed in part, without a way to go on",
                file=below.path,
            )
        asked |= going_on


def _version(path: str, item: dict[str, Any]) -> Entry:
    etag = str(item.get("ETag", "")).strip('"') or None
    mtime = item["LastModified"].timestamp()
    return Entry(path, item.get("Size", 0), mtime, etag=etag, version=item["VersionId"])
