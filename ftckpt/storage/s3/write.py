"""Write S3 objects, and trust only what is read back."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
from contextlib import suppress
from typing import Any

from ftckpt.errors import (
    ExistsError,
    FtckptError,
    IncompleteError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from ftckpt.own_files import TEMPORARY
from ftckpt.storage.retry import Backoff

from .client import S3Client, S3Object, is_transient, status_of, translate
from .copy import Doomed, delete_objects, head_object

_TOKEN = "ftckpt-token"
_PROBE = f"{TEMPORARY}probe-"
_PROBES = 3
_LARGEST = 5 << 30


def _request(at: S3Object, data: bytes) -> tuple[dict[str, Any], str]:
    """Return the parameters of a PUT and the MD5 of its body in hex."""
    if len(data) > _LARGEST:
        raise UnsupportedError(f"{at.url} would be larger than one PUT can be", file=at.path)
    md5 = hashlib.md5(data, usedforsecurity=False)
    digest = base64.b64encode(md5.digest()).decode()
    asked = {"Bucket": at.bucket, "Key": at.key, "Body": data, "ContentMD5": digest}
    return asked, md5.hexdigest()


async def put_object(client: S3Client, at: S3Object, data: bytes) -> None:
    """Store `data`, replacing an existing object, and compare the stored one with it.

    Raises:
        UnavailableError: after retries, or the stored object differs.
        DeniedError, NoResourceError, NotFoundError (bucket): the service refused.
    """
    asked, md5 = _request(at, data)
    await client.call("put_object", url=at.url, file=at.path, doing="write", **asked)
    head = await head_object(client, at)
    if head["ContentLength"] != len(data) or differs(head, md5):
        raise UnavailableError(f"{at.url} does not hold what was written to it", file=at.path)


def differs(head: dict[str, Any], md5: str) -> bool:
    """Whether the ETag shows other content; encrypted ones show nothing."""
    etag = str(head.get("ETag", "")).strip('"').lower()
    keyed = head.get("ServerSideEncryption", "").startswith("aws:kms") or head.get(
        "SSECustomerAlgorithm"
    )
    hexadecimal, _, parts = etag.partition("-")
    is_md5 = len(hexadecimal) == 32 and all(c in "0123456789abcdef" for c in hexadecimal)
    # Of one PUT, or of several parts; if we know neither, it shows nothing.
    is_md5 = is_md5 and bool(md5) and bool(parts) == ("-" in md5)
    return is_md5 and not keyed and etag != md5


async def supports_conditions(client: S3Client, beside: S3Object) -> bool:
    """Write a probe key twice and return whether the second PUT was refused.

    Removes probes of killed runs beside it. It may remove one of an active run, whose second PUT is
    then accepted: so only several accepted probes prove that nothing is refused.
    """
    directory = beside.key.rpartition("/")[0]
    stem = f"{directory}/{_PROBE}" if directory else _PROBE
    honoured = False
    for _ in range(_PROBES):
        at = beside._replace(key=stem + secrets.token_hex(8))
        honoured = await _refuses_second(client, at)
        if honoured:
            break
    with suppress(FtckptError):  # without permission to list or delete they stay
        await _remove_probes(client, beside, stem)
    return honoured


async def _remove_probes(client: S3Client, beside: S3Object, stem: str) -> None:
    """Remove the empty keys with that beginning, at most a thousand."""
    page = await client.call(
        "list_objects_v2", url=beside.url, file=beside.path, doing="list",
        Bucket=beside.bucket, Prefix=stem,
    )  # fmt: skip
    left = [item["Key"] for item in page.get("Contents", ()) if not item["Size"]]
    if left:
        await delete_objects(client, [Doomed(beside._replace(key=key)) for key in left])


async def _refuses_second(client: S3Client, at: S3Object) -> bool:
    try:
        await create_object(client, at, b"", conditional=True)
        try:
            await create_object(client, at, b"", conditional=True)
        except ExistsError:
            return True
        return False
    finally:
        await delete_objects(client, [Doomed(at)])


async def create_object(client: S3Client, at: S3Object, data: bytes, conditional: bool) -> None:
    """Store `data` under a key that must not exist.

    A refused condition and a lost answer look alike (our first attempt may have been stored), and
    some services let two racing writers win; so every outcome is settled by reading back a token of
    this call from the object's metadata.

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
        # Nothing is there: the request never arrived, or the refusing object is gone.
        wait = backoff.pause()
        if wait is None:
            raise UnavailableError(
                f"cannot create {at.url}: {failure} ({backoff.attempts} attempts)", file=at.path
            ) from failure
        await asyncio.sleep(wait)


async def replace_object(client: S3Client, at: S3Object, data: bytes, etag: str) -> None:
    """Store `data` under a key that must still show an ETag; only one of several writers succeeds.

    On a service without such a condition the ETag is checked just before.

    Raises:
        NotFoundError: the key is gone.
        IncompleteError: it was replaced.
        UnavailableError: after retries.
    """
    token = secrets.token_hex(16)
    asked, _ = _request(at, data)
    asked |= {"Metadata": {_TOKEN: token}, "IfMatch": etag}
    backoff = Backoff(client.options.retry_seconds)
    while True:
        if (await head_object(client, at)).get("ETag", "").strip('"') != etag.strip('"'):
            raise _replaced(at)
        try:
            await client.once("put_object", client.payer(asked))
        except Exception as error:
            if status_of(error) == 501 and asked.pop("IfMatch", None):
                continue
            if status_of(error) != 412 and not is_transient(error):
                raise translate(error, at.url, at.path, "write") from error
            failure: Exception | None = error
        else:
            failure = None
        # The answer to our first attempt may have been lost, and another writer may have come
        # since.
        if await _stored_token(client, at) == token:
            return
        wait = backoff.pause()
        if failure is None or status_of(failure) == 412:
            raise _replaced(at) from failure
        if wait is None:
            raise UnavailableError(
                f"cannot write {at.url}: {failure} ({backoff.attempts} attempts)", file=at.path
            ) from failure
        await asyncio.sleep(wait)


def _replaced(at: S3Object) -> IncompleteError:
    return IncompleteError(
        f"{at.url} was replaced since it was looked at", kind="changed-file", file=at.path
    )


def _taken(at: S3Object) -> ExistsError:
    return ExistsError(f"{at.url} exists already", file=at.path)


async def _stored_token(client: S3Client, at: S3Object) -> str | None:
    """Return the token of the stored object ("" without one), or None for an absent key."""
    try:
        head = await head_object(client, at)
    except NotFoundError:
        return None
    # Services return metadata names in different cases.
    metadata = {k.lower(): v for k, v in head.get("Metadata", {}).items()}
    return str(metadata.get(_TOKEN, ""))
