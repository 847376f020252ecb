"""Delete S3 objects, a thousand per request, and check the answer for each key."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from ftckpt.errors import (
    DeniedError,
    FtckptError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UnsupportedError,
)
from ftckpt.own_files import TEMPORARY

from .client import S3Client, gather
from .errors import translate
from .object import S3Object
from .read import head_object

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
