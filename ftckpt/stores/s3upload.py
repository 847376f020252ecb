"""Large S3 objects: a multipart upload whose parts and whole are checked by their MD5."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ftckpt.digest import BLOCK
from ftckpt.errors import FtckptError, NotFoundError, UnavailableError, UnsupportedError
from ftckpt.store import Upload

from .s3client import S3Client
from .s3read import S3Object
from .s3write import differs, put_object

_MOST_PARTS = 10_000


class S3Upload(Upload):
    """One object; the service shows nothing of it before it is finished.

    A run that is killed leaves an upload without an object, which costs storage until a lifecycle
    rule of the bucket, or `gc`, aborts it.

    Args:
        client: how requests are sent.
        at: the object.
        size: bytes that it will have.

    Raises:
        UnsupportedError: more than 10,000 parts (625 GiB).
    """

    unit = BLOCK
    resumes = False

    def __init__(self, client: S3Client, at: S3Object, size: int) -> None:
        self._client = client
        self._at = at
        self._size = size
        self._count = max(1, -(-size // self.unit))
        self._lock = threading.Lock()
        self._id = ""
        self._whole = b""  # the content, where it fits into one PUT
        self._parts: dict[int, tuple[str, bytes]] = {}
        if self._count > _MOST_PARTS:
            raise UnsupportedError(
                f"{at.url} would need {self._count} parts and the service takes {_MOST_PARTS}",
                hint="--max-shard-size makes smaller files",
                file=at.path,
            )

    def write(self, offset: int, view: memoryview) -> None:
        """Send one part; again where it was sent before."""
        data = bytes(view)
        if self._count == 1:
            self._whole = data
            return
        md5 = hashlib.md5(data, usedforsecurity=False).digest()
        number = offset // self.unit + 1
        answer = self._call(
            "upload_part",
            "write",
            UploadId=self._upload_id(),
            PartNumber=number,
            Body=data,
            ContentMD5=base64.b64encode(md5).decode(),
        )
        with self._lock:
            self._parts[number] = (str(answer["ETag"]), md5)

    def finish(self, size: int | None = None) -> None:
        """Put the parts together and compare size and ETag of what is stored."""
        self._size = self._size if size is None else size
        if self._count == 1 or not self._size:
            self._client.run(put_object(self._client, self._at, self._whole))
            return
        parts = sorted(self._parts.items())
        # Asked again after a lost answer, many services no longer know the upload that they have
        # finished; whether it was ours, the object itself says.
        with suppress(NotFoundError):
            self._call(
                "complete_multipart_upload",
                "finish",
                UploadId=self._upload_id(),
                MultipartUpload={
                    "Parts": [{"PartNumber": number, "ETag": etag} for number, (etag, _) in parts]
                },
            )
        self._require_stored(parts)
        self._id = ""

    def _require_stored(self, parts: Sequence[tuple[int, tuple[str, bytes]]]) -> None:
        head = self._call("head_object", "look up")
        # The service's own rule for the ETag of several parts: the MD5 of their MD5s, and how many.
        md5s = b"".join(md5 for _, (_, md5) in parts)
        whole = f"{hashlib.md5(md5s, usedforsecurity=False).hexdigest()}-{len(parts)}"
        if head["ContentLength"] != self._size or differs(head, whole):
            raise UnavailableError(
                f"{self._at.url} does not hold what was written to it", file=self._at.path
            )

    def close(self) -> None:
        """Abort what was not finished."""
        with self._lock:
            upload, self._id = self._id, ""
        if upload:
            try:
                self._call("abort_multipart_upload", "abort", UploadId=upload)
            except FtckptError:
                return  # the error that brought us here matters more; a lifecycle rule cleans up

    def _upload_id(self) -> str:
        with self._lock:
            if not self._id:
                self._id = str(self._call("create_multipart_upload", "write")["UploadId"])
            return self._id

    def _call(self, operation: str, doing: str, **more: Any) -> dict[str, Any]:
        at = self._at
        return self._client.run(
            self._client.call(
                operation,
                url=at.url,
                file=at.path,
                doing=doing,
                Bucket=at.bucket,
                Key=at.key,
                **more,
            )
        )
