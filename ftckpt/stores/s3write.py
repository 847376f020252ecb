"""Write and delete S3 objects, and believe only what is read back."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

from ftckpt.errors import (
    ExistsError,
    FtckptError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from ftckpt.retry import Backoff

from .atomic import TEMPORARY
from .s3client import S3Client, gather
from .s3errors import is_transient, status_of, translate
from .s3read import S3Object

_TOKEN = "ftckpt-token"
_LARGEST = 5 << 30
_BATCH = 1000


def _request(at: S3Object, data: bytes) -> tuple[dict[str, Any], str]:
    """Return the parameters of a PUT and the MD5 of its body in hex."""
    if len(data) > _LARGEST:
        raise UnsupportedError(f"{at.url} would be larger than one PUT can be", file=at.path)
    md5 = hashlib.md5(data, usedforsecurity=False)
    digest = base64.b64encode(md5.digest()).decode()
    asked = {"Bucket": at.bucket, "Key": at.key, "Body": data, "ContentMD5": digest}
    return asked, md5.hexdigest()


async def _head(client: S3Client, at: S3Object) -> dict[str, Any]:
    return await client.call(
        "head_object", url=at.url, file=at.path, doing="look up", Bucket=at.bucket, Key=at.key
    )


async def put_object(client: S3Client, at: S3Object, data: bytes) -> None:
    """Store `data`, replacing what was there, and compare what is stored with it.

    Raises:
        UnavailableError: after retries, or the stored object is not what was sent.
        DeniedError, NoResourceError, NotFoundError (bucket): the service refused.
    """
    asked, md5 = _request(at, data)
    await client.call("put_object", url=at.url, file=at.path, doing="write", **asked)
    head = await _head(client, at)
    if head["ContentLength"] != len(data) or differs(head, md5):
        raise UnavailableError(f"{at.url} does not hold what was written to it", file=at.path)


def differs(head: dict[str, Any], md5: str) -> bool:
    """Say whether the ETag shows other content; encrypted ones show nothing."""
    etag = str(head.get("ETag", "")).strip('"').lower()
    keyed = head.get("ServerSideEncryption", "").startswith("aws:kms") or head.get(
        "SSECustomerAlgorithm"
    )
    hexadecimal, _, parts = etag.partition("-")
    is_md5 = len(hexadecimal) == 32 and all(c in "0123456789abcdef" for c in hexadecimal)
    is_md5 = is_md5 and bool(parts) == ("-" in md5)  # of one PUT, or of several parts
    return is_md5 and not keyed and etag != md5


async def supports_conditions(client: S3Client, beside: S3Object) -> bool:
    """Write a probe key twice and say whether the second PUT was refused."""
    directory = beside.key.rpartition("/")[0]
    name = f"{TEMPORARY}probe-{secrets.token_hex(8)}"
    at = beside._replace(key=f"{directory}/{name}" if directory else name)
    try:
        await create_object(client, at, b"", conditional=True)
        try:
            await create_object(client, at, b"", conditional=True)
        except ExistsError:
            return True
        return False
    finally:
        await delete_objects(client, [at])


async def create_object(client: S3Client, at: S3Object, data: bytes, conditional: bool) -> None:
    """Store `data` under a key that must not exist.

    A refused condition and a lost answer look alike from here (our first attempt may have been
    stored), and some services let two racing writers win; so every outcome is settled by reading
    back a token of this call from the object's metadata.

    Raises:
        ExistsError: the key exists and is not from this call.
        UnsupportedError: the service refuses conditions as such, or does not keep metadata.
        UnavailableError: after retries.
    """
    token = secrets.token_hex(16)
    asked, _ = _request(at, data)
    asked["Metadata"] = {_TOKEN: token}
    if conditional:
        asked["IfNoneMatch"] = "*"
    elif await _stored_token(client, at) is not None:
        raise _taken(at)
    backoff = Backoff(client.options.retry_seconds)
    while True:
        failure: Exception | None = None
        try:
            await client.once("put_object", client.payer(asked))
        except Exception as error:
            if status_of(error) != 412 and not is_transient(error):
                raise translate(error, at.url, at.path, "create") from error
            failure = error
        stored = await _stored_token(client, at)
        if stored == token:
            return
        if stored == "" and failure is None:
            raise UnsupportedError(f"the service keeps no metadata with {at.url}", file=at.path)
        if stored is not None:
            raise _taken(at) from failure
        # Nothing is there: the request never arrived, or what refused it is gone by now.
        wait = backoff.pause()
        if wait is None:
            raise UnavailableError(
                f"cannot create {at.url}: {failure} ({backoff.attempts} attempts)", file=at.path
            ) from failure
        await asyncio.sleep(wait)


def _taken(at: S3Object) -> ExistsError:
    return ExistsError(f"{at.url} exists already", file=at.path)


async def _stored_token(client: S3Client, at: S3Object) -> str | None:
    """Return the token of what is stored ("" where it has none), or None for an absent key."""
    try:
        head = await _head(client, at)
    except NotFoundError:
        return None
    # Services differ in the case in which they give metadata names back.
    metadata = {k.lower(): v for k, v in head.get("Metadata", {}).items()}
    return str(metadata.get(_TOKEN, ""))


async def delete_objects(
    client: S3Client, targets: Sequence[S3Object]
) -> dict[str, FtckptError | None]:
    """Delete objects and return, for the path of each, None or the error that kept it."""
    batches = [targets[i : i + _BATCH] for i in range(0, len(targets), _BATCH)]
    result: dict[str, FtckptError | None] = {}
    for answers in await gather(*(_delete_batch(client, batch) for batch in batches)):
        result |= answers
    return result


async def _delete_batch(
    client: S3Client, batch: Sequence[S3Object]
) -> dict[str, FtckptError | None]:
    first = batch[0]
    try:
        answer = await client.call(
            "delete_objects",
            url=first.url,
            file=first.path,
            doing="delete",
            Bucket=first.bucket,
            Delete={"Objects": [{"Key": at.key} for at in batch], "Quiet": False},
        )
    except UnsupportedError:
        return dict(await gather(*(_delete_one(client, at) for at in batch)))
    except FtckptError as error:
        return {at.path: error for at in batch}
    gone = {item["Key"] for item in answer.get("Deleted", ())}
    errors = {item["Key"]: item for item in answer.get("Errors", ())}
    return {at.path: _outcome(at, at.key in gone, errors.get(at.key)) for at in batch}


def _outcome(at: S3Object, gone: bool, refusal: dict[str, Any] | None) -> FtckptError | None:
    if refusal is None:
        if gone:
            return None
        return UnavailableError(f"the service did not say whether {at.url} is gone", file=at.path)
    code = refusal.get("Code", "")
    if code == "NoSuchKey":
        return None
    from botocore.exceptions import ClientError

    status = {"AccessDenied": 403, "MethodNotAllowed": 405, "NotImplemented": 501}.get(code, 500)
    response: Any = {"Error": refusal, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate(ClientError(response, "DeleteObjects"), at.url, at.path, "delete")


async def _delete_one(client: S3Client, at: S3Object) -> tuple[str, FtckptError | None]:
    try:
        await client.call(
            "delete_object", url=at.url, file=at.path, doing="delete", Bucket=at.bucket, Key=at.key
        )
    except NotFoundError:
        return at.path, None
    except FtckptError as error:
        return at.path, error
    return at.path, None
