"""Large S3 objects: multipart uploads whose parts the service or we check against digests.

Large S3 objects whose parts several machines send: one upload, whose id all of them know.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ftckpt.errors import (
    FtckptError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UnsupportedError,
)
from ftckpt.extents import BLOCK
from ftckpt.storage.store import JointUpload, Upload

from .client import DAMAGED, Damaged, S3Client, S3Object, code_of
from .write import differs, put_object

_MOST_PARTS = 10_000
_ONE_PUT = 8 << 20  # up to this size one PUT at the end costs less than an upload's requests


class SentPart(NamedTuple):
    """A part as the service has taken it."""

    etag: str
    md5: bytes | None  # of the sent bytes, if the service does not check digests


class S3Upload(Upload):
    """One object; it is invisible until it is finished.

    A killed run leaves an upload without an object, which costs storage until a lifecycle rule of
    the bucket, or `gc`, aborts it.

    Raises:
        UnsupportedError: more than 10,000 parts (625 GiB).
    """

    unit = BLOCK

    def __init__(self, client: S3Client, at: S3Object, size: int) -> None:
        self._client = client
        self._at = at
        self._size = size
        self._lock = threading.Lock()
        self._id = ""
        self._closed = False
        self._whole: bytes | None = b"" if size <= _ONE_PUT else None
        self._parts: dict[int, SentPart] = {}
        if -(-size // self.unit) > _MOST_PARTS:
            raise UnsupportedError(
                f"{at.url} would need {-(-size // self.unit)} parts and the service takes "
                f"{_MOST_PARTS}",
                hint="--max-shard-size makes smaller files",
                file=at.path,
            )

    def write(self, offset: int, view: memoryview) -> None:
        """Send one part, also a second time."""
        if self._whole is not None:
            self._whole = bytes(view)
            return
        number = offset // self.unit + 1
        part = {"UploadId": self._upload_id(), "PartNumber": number}
        md5 = None
        if not self._refuses_damage():
            md5 = hashlib.md5(view, usedforsecurity=False).digest()
            part["ContentMD5"] = base64.b64encode(md5).decode()
        answer = self._call("upload_part", "write", Body=view, **part)
        with self._lock:
            self._parts[number] = SentPart(str(answer["ETag"]), md5)

    def finish(self, size: int | None = None) -> None:
        """Join the parts and compare size and ETag of the stored object."""
        self._size = self._size if size is None else size
        if self._whole is not None or not self._size:
            self._client.run(put_object(self._client, self._at, self._whole or b""))
            return
        parts = sorted(self._parts.items())
        # After a lost answer, many services no longer know the upload that they have finished; the
        # object itself shows whether it was ours.
        with suppress(NotFoundError):
            self._call(
                "complete_multipart_upload",
                "finish",
                UploadId=self._upload_id(),
                MultipartUpload={
                    "Parts": [{"PartNumber": n, "ETag": part.etag} for n, part in parts]
                },
            )
        self._require_stored([part for _, part in parts])
        self._id = ""

    def _require_stored(self, parts: Sequence[SentPart]) -> None:
        head = self._call("head_object", "look up")
        if head["ContentLength"] != self._size or differs(head, _etag_of(parts)):
            raise UnavailableError(
                f"{self._at.url} does not hold what was written to it", file=self._at.path
            )

    def close(self) -> None:
        """Abort an unfinished upload."""
        with self._lock:
            self._closed = True
            upload, self._id = self._id, ""
        if upload:
            try:
                self._call("abort_multipart_upload", "abort", UploadId=upload)
            except FtckptError:
                return  # the original error matters more; a lifecycle rule cleans up

    def _upload_id(self) -> str:
        with self._lock:
            if self._closed:  # nobody would abort a new one
                raise UnavailableError(f"writing {self._at.url} was given up", file=self._at.path)
            if not self._id:
                self._id = str(self._call("create_multipart_upload", "write")["UploadId"])
            return self._id

    def _refuses_damage(self) -> bool:
        with self._client.asking:
            if self._client.refuses_damage is None:
                asked = refuses_damage(self._client, self._at)
                self._client.refuses_damage = self._client.run(asked)
            return self._client.refuses_damage

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


def _etag_of(parts: Sequence[SentPart]) -> str:
    """Return the ETag of several parts by the service's own rule; "" if its rule differs.

    It is the MD5 of their MD5s, and their number. Without our own MD5s it shows that the service
    has joined the parts whose digests it has checked.
    """
    try:
        md5s = b"".join(part.md5 or bytes.fromhex(part.etag.strip('"')) for part in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(md5s, usedforsecurity=False).hexdigest()}-{len(parts)}"


async def refuses_damage(client: S3Client, at: S3Object) -> bool:
    """Send a damaged part and return whether the service refused it for that.

    The part belongs to an upload of its own, which is aborted, because some imitations replace no
    part. `at` is an object that may be written.

    Raises:
        FtckptError: no upload could be begun, or no answer came.
    """
    place = {"Bucket": at.bucket, "Key": at.key}

    async def once(s3: Any) -> bool:
        from botocore.exceptions import ClientError

        try:
            await s3.upload_part(**client.payer(place | part | {"Body": Damaged()}))
        except ClientError as error:
            return code_of(error) in DAMAGED
        return False

    begun = await client.call(
        "create_multipart_upload", url=at.url, file=at.path, doing="write", **place
    )
    part = {"UploadId": begun["UploadId"], "PartNumber": 1}
    try:
        return await client.attempt(once, url=at.url, file=at.path, doing="write")
    finally:
        with suppress(FtckptError):  # only the answer matters; a lifecycle rule cleans up
            await client.call(
                "abort_multipart_upload", url=at.url, file=at.path, doing="abort",
                UploadId=begun["UploadId"], **place,
            )  # fmt: skip


_UNKNOWN = "-"  # in a mark: the service itself checks digests, so that the ETag is one


class S3JointUpload(S3Upload, JointUpload):
    """One object; it is invisible until somebody finishes it.

    Args:
        client: of the service.
        at: the object.
        size: of it.
        upload: id of the upload.
        marks: of parts that others have sent, by offset.

    Raises:
        UnsupportedError: too many parts.
        RefusedError: a mark is none.
    """

    def __init__(
        self, client: S3Client, at: S3Object, size: int, upload: str, marks: Mapping[int, str]
    ) -> None:
        super().__init__(client, at, size)
        self._whole = None
        self._id = self._joined = upload
        for offset, mark in marks.items():
            self._parts[offset // self.unit + 1] = _part(mark, at)

    def mark(self, offset: int) -> str:
        """Return the ETag of a part, and our own MD5 of it where the service checks none."""
        part = self._parts[offset // self.unit + 1]
        return f"{part.etag} {_UNKNOWN if part.md5 is None else part.md5.hex()}"

    def kept(self) -> Collection[int] | None:
        """Ask the service for the parts; those that it has otherwise are forgotten."""
        listed = self._listed()
        if listed is None:
            whole = len(self._parts) == -(-self._size // self.unit)
            if not (whole and self._is_stored()):
                return None
        else:
            known = self._parts.items()
            self._parts = {n: part for n, part in known if listed.get(n) == _bare(part.etag)}
        return [(number - 1) * self.unit for number in self._parts]

    def close(self) -> None:
        """Let go; others may go on with it."""
        self._closed = True

    def _listed(self) -> dict[int, str] | None:
        """Return the ETags of all parts that were sent, by number; None where it is gone."""
        found: dict[int, str] = {}
        after: dict[str, int] = {}  # of the last page
        while True:
            try:
                page = self._call("list_parts", "look up", UploadId=self._joined, **after)
            except NotFoundError:
                return None
            for part in page.get("Parts", ()):
                found[int(part["PartNumber"])] = _bare(str(part["ETag"]))
            if not page.get("IsTruncated"):
                return found
            last = int(page.get("NextPartNumberMarker") or 0)
            if last <= after.get("PartNumberMarker", 0):
                raise UnavailableError(
                    f"the parts of {self._at.url} are listed in part, without a way to go on",
                    file=self._at.path,
                )
            after = {"PartNumberMarker": last}

    def _is_stored(self) -> bool:
        try:
            self._require_stored([self._parts[number] for number in sorted(self._parts)])
        except (NotFoundError, UnavailableError):
            return False
        return True


def _part(mark: str, at: S3Object) -> SentPart:
    etag, _, md5 = mark.rpartition(" ")
    try:
        return SentPart(etag, None if md5 == _UNKNOWN else bytes.fromhex(md5))
    except ValueError as error:
        raise RefusedError(f"{mark!r} marks no part of {at.url}", file=at.path) from error


def _bare(etag: str) -> str:
    return etag.strip('"').lower()
