"""Large S3 objects whose parts several machines send: one upload, whose id all of them know."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ftckpt.errors import NotFoundError, RefusedError, UnavailableError
from ftckpt.storage.store import JointUpload

from .client import S3Client
from .object import S3Object
from .upload import S3Upload, SentPart

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
