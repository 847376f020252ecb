"""S3 and compatible services."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftckpt.errors import FtckptError, NotFoundError, UnavailableError, UsageError
from ftckpt.own_files import FOLDER
from ftckpt.storage.keys import safe_key
from ftckpt.storage.options import StoreOptions
from ftckpt.storage.ranges import MergedRange, plan_runs, waves
from ftckpt.storage.store import Entry, EntryKind, Store, Traits, Unfinished, Usage

from .client import PARALLEL, S3Client, S3Object, archived, gather
from .copy import (
    Doomed,
    S3Reader,
    Version,
    copy_object,
    delete_objects,
    head_object,
    honours_conditions,
    read_bytes,
    still_there,
)
from .hidden_objects import abort_uploads, last_part, list_unfinished, list_versions
from .upload import S3JointUpload, S3Upload
from .write import create_object, put_object, replace_object, supports_conditions

if TYPE_CHECKING:
    from datetime import datetime

    from ftckpt.extents import Extent

_ARCHIVE_CLASSES = frozenset({"GLACIER", "DEEP_ARCHIVE"})


class S3Store(Store):
    """The keys below one `s3://bucket/prefix`.

    `create` relies on conditional PUT. Its first use writes a probe key twice; if the service
    accepts the second, `traits.conditional_put` says so, and `create` then checks first, writes,
    and reads its own token back, which does not exclude a race.

    A prefix that holds only a directory marker (an empty key ending in a slash) counts as empty. A
    key that cannot be a relative path (`a//b`, `../c`) is listed as SPECIAL.
    """

    def __init__(self, url: str, options: StoreOptions) -> None:
        self.url = self._opened_at = url
        bucket, _, prefix = url.partition("://")[2].partition("/")
        if not bucket:
            raise UsageError(f"{url} names no bucket")
        self._bucket = bucket
        self._prefix = prefix.rstrip("/")
        self.client = S3Client(options)
        self.traits = Traits(
            local=False, conditional_put=None, gap=1 << 20, parallel=PARALLEL, joint_uploads=True,
            links=False,
        )  # fmt: skip
        # Keys that a listing of this store showed; opening them needs no request of its own.
        self._seen: dict[str, bool] = {}
        self._conditional_delete: bool | None = None

    def __reduce__(self) -> tuple[type[S3Store], tuple[str, StoreOptions], dict[str, Any]]:
        """Pickle as URL and options; connections stay here."""
        kept = {"url": self.url, "options": self.options}
        return S3Store, (self._opened_at, self.client.options), kept

    def identity(self, path: str = "") -> str:
        """Return the key with its service's address: two services may share a bucket's name."""
        endpoint = self.client.options.endpoint or os.environ.get(
            "AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL", "")
        )
        at = self.at(path)
        return f"{endpoint.rstrip('/').lower()} s3://{at.bucket}/{at.key}".rstrip("/")

    def usage(self) -> Usage:
        """Return the requests sent, retries included, and the bytes of content received."""
        return Usage(self.client.requests, self.client.bytes_read)

    def at(self, path: str) -> S3Object:
        """Return the address of a key."""
        return S3Object(self._bucket, safe_key(self._prefix, path), path, self.describe(path))

    def stat(self, path: str) -> Entry:
        """Return the entry of one key; a prefix of other keys is a DIRECTORY."""
        return self.client.run(self._stat(path))

    def children(self, path: str = "") -> list[Entry]:
        """Return what lies directly below `path`, sorted by path."""
        return self.client.run(self._list(path, deep=False))

    def walk(self, path: str = "") -> list[Entry]:
        """Return every object below `path`, sorted by path."""
        return self.client.run(self._list(path, deep=True))

    def open(self, path: str) -> S3Reader:
        """Open one object for ranged reads."""
        if path not in self._seen:
            self.client.run(self._head(path))
        if self._seen.get(path):
            raise archived(self.describe(path), path)
        return S3Reader(self.client, self.at(path))

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes at `offset` (to the end where None)."""
        if length is None:
            length = self.client.run(self._head(path)).size - offset
        return self.open(path).read(offset, length)

    def read_many(self, extents: Sequence[Extent]) -> list[bytes]:
        """Return the bytes of each extent, in order, read concurrently and in few requests."""
        result = [b""] * len(extents)
        versions = {e.file: Version() for e in extents}

        async def fetch(run: MergedRange) -> None:
            if self._seen.get(run.file):
                raise archived(self.describe(run.file), run.file)
            at, version = self.at(run.file), versions[run.file]
            buffer = await read_bytes(self.client, at, run.offset, run.length, version)
            for want in run.wants:
                result[want.asked] = bytes(buffer[want.start :][: want.length])

        async def fetch_all() -> None:
            for wave in waves(plan_runs(extents, self.traits.gap)):
                await gather(*(fetch(run) for run in wave))

        self.client.run(fetch_all())
        return result

    def put(self, path: str, data: bytes) -> None:
        """Store `data` under `path`; compares size and ETag of the stored object."""
        self.client.run(put_object(self.client, self.at(path), data))

    def create(self, path: str, data: bytes) -> None:
        """Store `data` under `path`, which must not exist (see the class for races)."""
        if self.traits.conditional_put is None:
            honoured = self.client.run(supports_conditions(self.client, self.at(path)))
            self.traits = self.traits._replace(conditional_put=honoured)
        conditional = bool(self.traits.conditional_put)
        self.client.run(create_object(self.client, self.at(path), data, conditional))

    def replace(self, entry: Entry, data: bytes) -> None:
        """Store `data` in place of a listed object, by one conditional PUT."""
        if not entry.etag:
            super().replace(entry, data)
            return
        self.client.run(replace_object(self.client, self.at(entry.path), data, _quoted(entry)))

    def upload(self, path: str, size: int) -> S3Upload:
        """Begin an object in parts; it is invisible until it is finished."""
        return S3Upload(self.client, self.at(path), size)

    def begin_joint_upload(self, path: str) -> str:
        """Begin a multipart upload, and return its id."""
        at = self.at(path)
        begun = self.client.call(
            "create_multipart_upload", url=at.url, file=at.path, doing="write",
            Bucket=at.bucket, Key=at.key,
        )  # fmt: skip
        return str(self.client.run(begun)["UploadId"])

    def join_upload(
        self, path: str, size: int, upload: str, marks: Mapping[int, str]
    ) -> S3JointUpload:
        """Go on with a multipart upload that was begun anywhere."""
        return S3JointUpload(self.client, self.at(path), size, upload, marks)

    def duplicate(self, entry: Entry, copy: str) -> None:
        """Let the service copy one key to another; the copy is visible when it is whole."""
        self.require_still(entry)  # some services ignore conditions
        at, target = self.at(entry.path), self.at(copy)
        self.client.run(copy_object(self.client, at, entry.size, _quoted(entry), target))

    def delete(self, paths: Sequence[str]) -> Mapping[str, FtckptError | None]:
        """Delete keys, a thousand per request; an absent one is gone."""
        result: dict[str, FtckptError | None] = {}
        targets: list[S3Object] = []
        for path in paths:
            try:
                targets.append(self.at(path))
            except FtckptError as error:
                result[path] = error
        answers = self.client.run(delete_objects(self.client, [Doomed(at) for at in targets]))
        result |= {at.path: answer for at, answer in zip(targets, answers, strict=True)}
        return {path: result[path] for path in paths}

    def erase(self, entries: Sequence[Entry]) -> list[FtckptError | None]:
        """Delete listed objects: a version by its name, anything else by its ETag.

        Two probe keys reveal a service that does not delete by ETag; each key is then looked up
        just before it is deleted.
        """
        return self.client.run(self._erase(entries))

    def history(self, files: Sequence[Entry]) -> list[Entry]:
        """Return every version of some files, deletions included; empty if none are kept."""
        found = [self.at(e.path) for e in files]
        return self.client.run(list_versions(self.client, found)) if found else []

    def unfinished(self, path: str = "") -> list[Unfinished]:
        """Return the unfinished multipart uploads below `path`."""
        return self.client.run(list_unfinished(self.client, self.at(path)))

    def last_sent(self, upload: Unfinished) -> float | None:
        """Return when the last part of a multipart upload arrived."""
        return self.client.run(last_part(self.client, self.at(upload.path), upload.id))

    def abort(self, uploads: Sequence[Unfinished]) -> list[FtckptError | None]:
        """Abort multipart uploads; for each, in order, None when it is gone."""
        found = [(self.at(upload.path), upload.id) for upload in uploads]
        return self.client.run(abort_uploads(self.client, found))

    async def _erase(self, entries: Sequence[Entry]) -> list[FtckptError | None]:
        doomed = [Doomed(self.at(e.path), e.version or "", _quoted(e)) for e in entries]
        if self._conditional_delete is None and any(target.etag for target in doomed):
            probe = self.at(FOLDER)
            self._conditional_delete = await honours_conditions(self.client, probe)
        if self._conditional_delete:
            return await delete_objects(self.client, doomed)
        plain = [target for target in doomed if target.etag]
        looked = await gather(*(still_there(self.client, target) for target in plain))
        kept = {target: error for target, error in zip(plain, looked, strict=True) if error}
        going = [target._replace(etag="") for target in doomed if target not in kept]
        answers = iter(await delete_objects(self.client, going))
        return [kept[target] if target in kept else next(answers) for target in doomed]

    async def _stat(self, path: str) -> Entry:
        if self.at(path).key:
            try:
                return await self._head(path)
            except NotFoundError:
                # Not an object; perhaps a prefix. A failed listing raises by itself.
                pass
        async for _ in self._pages(path, deep=True):
            return Entry(path, 0, None, EntryKind.DIRECTORY)
        raise NotFoundError(f"{self.describe(path)} does not exist", file=path)

    async def _head(self, path: str) -> Entry:
        at = self.at(path)
        if not at.key:
            raise NotFoundError(f"{at.url} is a bucket, not an object", file=path)
        head = await head_object(self.client, at)
        restored = 'ongoing-request="false"' in head.get("Restore", "")
        cold = head.get("StorageClass") in _ARCHIVE_CLASSES or bool(head.get("ArchiveStatus"))
        frozen = cold and not restored
        self._seen[path] = frozen
        modified: datetime | None = head.get("LastModified")
        mtime = modified.timestamp() if modified else None
        return Entry(
            path, head["ContentLength"], mtime, etag=_bare(head.get("ETag")), archived=frozen
        )

    async def _list(self, path: str, *, deep: bool) -> list[Entry]:
        found: list[Entry] = []
        async for page in self._pages(path, deep=deep):
            found += page
        if not found:
            raise NotFoundError(f"nothing lies below {self.describe(path)}", file=path)
        self._seen.update((e.path, e.archived) for e in found if e.kind is EntryKind.FILE)
        return sorted(found, key=lambda e: (e.path, e.kind))

    async def _pages(self, path: str, *, deep: bool) -> AsyncIterator[list[Entry]]:
        """Yield the non-empty pages of a complete listing, or raise."""
        at = self.at(path)
        base = f"{at.key}/" if at.key else ""
        prefix = f"{path}/" if path else ""
        asked: dict[str, Any] = {"Bucket": at.bucket, "Prefix": base}
        asked["OptionalObjectAttributes"] = ["RestoreStatus"]
        if not deep:
            asked["Delimiter"] = "/"
        while True:
            page = await self.client.call(
                "list_objects_v2", url=at.url, file=path, doing="list", **asked
            )
            entries = [
                _listed(item, prefix + item["Key"][len(base) :])
                for item in page.get("Contents", ())
                if not (item["Key"].endswith("/") and item["Size"] == 0)
            ]
            for common in page.get("CommonPrefixes", ()):
                name = prefix + common["Prefix"][len(base) : -1]
                entries.append(Entry(name, 0, None, _kind(name, EntryKind.DIRECTORY)))
            if entries:
                yield entries
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token or token == asked.get("ContinuationToken"):
                raise UnavailableError(
                    f"the listing of {at.url} is cut short without a way to go on", file=path
                )
            asked["ContinuationToken"] = token


def _kind(path: str, kind: EntryKind) -> EntryKind:
    """Return `kind`, or SPECIAL for a key that is not a relative path and cannot be opened."""
    return EntryKind.SPECIAL if set(path.split("/")) & {"", ".", ".."} else kind


def _listed(item: dict[str, Any], path: str) -> Entry:
    cold = item.get("StorageClass") in _ARCHIVE_CLASSES
    restored = cold and bool(item.get("RestoreStatus", {}).get("RestoreExpiryDate"))
    return Entry(
        path,
        item["Size"],
        item["LastModified"].timestamp(),
        _kind(path, EntryKind.FILE),
        etag=_bare(item.get("ETag")),
        archived=cold and not restored,
    )


def _quoted(entry: Entry) -> str:
    """Return the ETag that a key must still show; a version needs none."""
    return f'"{entry.etag}"' if entry.etag and not entry.version else ""


def _bare(etag: str | None) -> str | None:
    return etag.strip('"') if etag else None
