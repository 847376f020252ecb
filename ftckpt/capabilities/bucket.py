"""What a bucket can do, tried with empty keys of our own that go again, versions included.

Names and limits are those of the S3 API: GetBucketVersioning, GetBucketLifecycleConfiguration and
GetObjectLockConfiguration. A service may not know a call, or not allow it: then the line says so.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from ftckpt.amounts import human_duration
from ftckpt.errors import DeniedError, FtckptError, NotFoundError, UnsupportedError
from ftckpt.own_files import TEMPORARY
from ftckpt.storage.s3.client import S3Client, S3Object, code_of
from ftckpt.storage.s3.copy import Doomed, delete_objects, honours_conditions
from ftckpt.storage.s3.store import S3Store
from ftckpt.storage.s3.upload import refuses_damage
from ftckpt.storage.s3.write import supports_conditions
from ftckpt.storage.store import Store

from .directory import READING, WRITING
from .machine import Check, State

_PROBE = f"{TEMPORARY}doctor-"
_SKEW = 60.0  # a Date header has whole seconds, and an answer takes time
_REFUSED_SKEW = 900.0  # S3 refuses requests of a clock that is further away
# What S3 says where a bucket has no such setting; a lookalike may say anything else.
_NONE = ("NoSuchLifecycleConfiguration", "ObjectLockConfigurationNotFoundError")
_OLD = 600.0  # no probe of a run at work is as old


def examine_bucket(store: S3Store) -> Iterator[Check]:
    """Yield what a prefix of a bucket can do.

    Raises:
        NotFoundError: the bucket does not exist.
        DeniedError, UnavailableError: it cannot be listed.
    """
    client, root = store.client, store.at("")
    asked: dict[str, Any] = {"Bucket": root.bucket, "Prefix": _below(root), "MaxKeys": 1}
    began = time.time()
    page = client.run(_call(client, "list_objects_v2", root, "list", **asked))
    yield Check("place", "listing", State.OK, "allowed", "latest, status, gc and sync list")
    if not page.get("Contents"):
        yield Check(
            "place", "content", State.NOTE, "empty", "no key begins with this prefix",
            "is the prefix spelt right?",
        )  # fmt: skip
    yield _reading(client, root, page)
    yield from _clock(page, began)
    versioned = yield from _versions(client, root)
    yield from _lifecycle(client, root)
    locked = yield from _object_lock(client, root)
    if locked:
        yield Check(
            "place", "writing", State.UNKNOWN, "not tried",
            "a key of ours could not be removed again before its lock ends",
        )  # fmt: skip
        return
    try:
        yield from _written(store)
    finally:
        _remove_probes(client, root, versioned=versioned)


def examine_other(store: Store) -> Iterator[Check]:
    """Yield what another kind of object store can do.

    Raises:
        NotFoundError, DeniedError, UnavailableError: it cannot be listed.
    """
    store.children("")
    yield Check("place", "listing", State.OK, "allowed", READING)
    name = f"{_PROBE}{secrets.token_hex(8)}"
    try:
        store.put(name, b"ftckpt")
        read = store.read(name) == b"ftckpt"
        (failed,) = store.delete([name]).values()
    except FtckptError as error:
        yield _refused("writing", error)
        return
    if failed is not None:
        yield _refused("deleting", failed)
    elif read:
        yield Check("place", "writing", State.OK, "allowed", WRITING)
    held = store.traits.conditional_put
    yield _conditions("conditional writes", held)


def _below(root: S3Object) -> str:
    return f"{root.key}/" if root.key else ""


async def _call(
    client: S3Client, operation: str, at: S3Object, doing: str, **asked: Any
) -> dict[str, Any]:
    return await client.call(operation, url=at.url, file=at.path, doing=doing, **asked)


def _reading(client: S3Client, root: S3Object, page: dict[str, Any]) -> Check:
    for item in page.get("Contents", ()):
        at = root._replace(key=item["Key"])
        asked = {"Bucket": at.bucket, "Key": at.key}
        try:
            client.run(_call(client, "head_object", at, "read", **asked))
        except FtckptError as error:
            return Check(
                "place",
                "reading",
                State.PROBLEM,
                "refused",
                f"these fail here: {READING}",
                error.hint,
            )
    return Check("place", "reading", State.OK, "allowed", READING)


def _clock(page: dict[str, Any], began: float) -> Iterator[Check]:
    headers = page.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        told = parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, ValueError, TypeError):
        return
    skew = max(began - 1 - told, told - time.time(), 0.0)
    if skew <= _SKEW:
        yield Check("place", "clock", State.OK, "as ours", "ages and leases are right")
        return
    side = "behind" if told < began else "ahead"
    yield Check(
        "place", "clock", State.PROBLEM, f"{human_duration(skew)} {side} of ours",
        "ages are wrong by that, and S3 refuses requests from "
        f"{human_duration(_REFUSED_SKEW)} on",
        "set this machine's clock (NTP)",
    )  # fmt: skip


def _asked(
    client: S3Client, root: S3Object, operation: str, what: str, field: str = ""
) -> dict[str, Any] | Check:
    """Return a bucket's setting, {} where there is none; or the line for why it is unknown.

    Args:
        client: of the service.
        root: names the bucket.
        operation: that asks.
        what: the setting.
        field: that the answer has where there is a setting; lookalikes answer with anything.
    """
    unknown = Check(
        "place", what, State.UNKNOWN, "the service does not say",
        "it has no such setting, or none that can be asked for",
    )  # fmt: skip
    asked = _call(client, operation, root, f"ask for the {what} of", Bucket=root.bucket)
    try:
        answer = client.run(asked)
    except NotFoundError as error:
        cause = error.__cause__
        return {} if isinstance(cause, Exception) and code_of(cause) in _NONE else unknown
    except DeniedError:
        return unknown._replace(found="may not be asked", do="ask the owner of the bucket")
    except UnsupportedError:
        return unknown
    except FtckptError as error:
        return unknown._replace(found="no answer", do=error.message)
    return answer if not field or answer.get(field) else unknown


def _versions(client: S3Client, root: S3Object) -> Generator[Check, None, bool]:
    """Yield the line of versioning; return whether deleted keys keep versions."""
    answer = _asked(client, root, "get_bucket_versioning", "versions")
    if isinstance(answer, Check):
        yield answer
        return True  # if it has some, they are looked for
    status = answer.get("Status", "")
    if status == "Enabled":
        yield Check(
            "place", "versions", State.NOTE, "kept",
            "what gc deletes is still stored and paid for; gc purge says how much",
            "a lifecycle rule NoncurrentVersionExpiration frees it",
        )  # fmt: skip
    else:
        yield Check(
            "place", "versions", State.OK, status.lower() or "none",
            "what is deleted is gone, and its space is free",
        )  # fmt: skip
    return bool(status)


def _lifecycle(client: S3Client, root: S3Object) -> Iterator[Check]:
    """Yield a line for each rule that acts on keys of this root."""
    answer = _asked(client, root, "get_bucket_lifecycle_configuration", "lifecycle rules", "Rules")
    if isinstance(answer, Check):
        yield answer
        return
    aborts = deletes = False
    for number, rule in enumerate(answer.get("Rules", ()), 1):
        name = f"lifecycle rule {rule.get('ID') or number}"
        if rule.get("Status") != "Enabled" or not _meets(rule, _below(root)):
            continue
        where = _where(rule)
        when = _when(rule.get("Expiration", {}))
        if when:
            deletes = True
            yield Check(
                "place", name, State.PROBLEM, f"deletes {where} {when}",
                "it deletes files of live checkpoints, pinned ones too",
                "narrow or remove the rule, and let gc drop what no policy keeps",
            )  # fmt: skip
        for move in rule.get("Transitions", ()):
            tier = str(move.get("StorageClass", "another tier"))
            archive = tier in ("GLACIER", "DEEP_ARCHIVE")
            yield Check(
                "place", name, State.PROBLEM if archive else State.NOTE,
                f"moves {where} to {tier} {_when(move)}",
                "an archived checkpoint cannot be read before it is restored" if archive
                else "reading costs more there",
                "keep checkpoints of this prefix out of the rule" if archive else "",
            )  # fmt: skip
        aborts |= "AbortIncompleteMultipartUpload" in rule
    if not deletes:
        yield Check(
            "place", "lifecycle rules", State.OK, "none deletes here", "checkpoints stay until gc"
        )
    yield Check(
        "place", "unfinished uploads", State.OK if aborts else State.NOTE,
        "a rule removes them" if aborts else "no rule removes them",
        "what a killed upload leaves costs storage, and no listing shows it",
        "" if aborts else "add a lifecycle rule AbortIncompleteMultipartUpload of 7 days",
    )  # fmt: skip


def _prefix(rule: dict[str, Any]) -> str:
    chosen = rule.get("Filter") or {}
    both = chosen.get("And") or {}
    return str(rule.get("Prefix") or chosen.get("Prefix") or both.get("Prefix") or "")


def _meets(rule: dict[str, Any], below: str) -> bool:
    """Say whether a rule may act on keys of a root; ftckpt and trainers put no tags on keys."""
    chosen = rule.get("Filter") or {}
    if "Tag" in chosen or (chosen.get("And") or {}).get("Tags"):
        return False
    prefix = _prefix(rule)
    return below.startswith(prefix) or prefix.startswith(below)


def _where(rule: dict[str, Any]) -> str:
    prefix = _prefix(rule)
    return f"keys that begin with {prefix}" if prefix else "every key"


def _when(setting: dict[str, Any]) -> str:
    """Return when a rule acts; "" where it never does."""
    if "Days" in setting:
        return f"after {setting['Days']} days"
    date = setting.get("Date")
    if isinstance(date, datetime):
        return f"on {date.astimezone(UTC):%Y-%m-%d}"
    return ""


def _object_lock(client: S3Client, root: S3Object) -> Generator[Check, None, bool]:
    """Yield the line of object lock; return whether new keys are locked."""
    field = "ObjectLockConfiguration"
    answer = _asked(client, root, "get_object_lock_configuration", "object lock", field)
    if isinstance(answer, Check):
        yield answer
        return False
    setting = answer.get(field, {})
    rule = setting.get("Rule", {}).get("DefaultRetention", {})
    if not rule:
        found = "on, without a default" if setting.get("ObjectLockEnabled") else "off"
        means = "gc purge frees what it deletes" if found == "off" else "only locked keys stay"
        yield Check("place", "object lock", State.OK, found, means)
        return False
    span = f"{rule['Days']} days" if "Days" in rule else f"{rule.get('Years', '?')} years"
    yield Check(
        "place", "object lock", State.NOTE, f"{rule.get('Mode', 'on')}, {span}",
        "nobody deletes a version before that: gc purge frees nothing sooner",
        "keep staging and scratch places in another bucket",
    )  # fmt: skip
    return True


def _written(store: S3Store) -> Iterator[Check]:
    """Yield what takes keys of our own to be known."""
    client = store.client
    at = store.at(f"{_PROBE}{secrets.token_hex(8)}")
    place = {"Bucket": at.bucket, "Key": at.key}
    try:
        client.run(_call(client, "put_object", at, "write", Body=b"", **place))
    except FtckptError as error:
        yield _refused("writing", error)
        return
    yield Check("place", "writing", State.OK, "allowed", WRITING)
    head = client.run(_call(client, "head_object", at, "look up", **place))
    if head.get("ObjectLockMode"):
        yield Check(
            "place", "new keys", State.NOTE, "are locked",
            f"the empty key {at.key} stays until its lock ends; nothing more was tried",
            "ask the owner of the bucket for its object lock",
        )  # fmt: skip
        return
    (failed,) = client.run(delete_objects(client, [Doomed(at)]))
    if failed is not None:
        yield _refused("deleting", failed)
        return
    yield Check("place", "deleting", State.OK, "allowed", "gc and transfers remove what is theirs")
    yield _tried("conditional writes", lambda: client.run(supports_conditions(client, at)))
    yield _tried("conditional deletes", lambda: client.run(honours_conditions(client, at)))
    try:
        refuses = client.run(refuses_damage(client, at))
    except FtckptError as error:
        yield _refused("multipart uploads", error)
        return
    yield Check("place", "multipart uploads", State.OK, "allowed", "large files are written so")
    yield Check(
        "place", "checksums", State.OK if refuses else State.NOTE,
        "damaged parts are refused" if refuses else "damaged parts are taken",
        "what a network damages is not stored" if refuses
        else "each upload is compared with the service's ETag, or read back",
    )  # fmt: skip


def _tried(name: str, ask: Any) -> Check:
    try:
        held: bool = ask()
    except FtckptError as error:
        return _refused(name, error)
    return _conditions(name, held)


def _conditions(name: str, held: bool | None) -> Check:
    writes = name == "conditional writes"
    if held:
        means = "two runs never write one name" if writes else "gc deletes what it looked at alone"
        return Check("place", name, State.OK, "hold", means)
    if held is None:
        return Check("place", name, State.UNKNOWN, "not tried", "the first write finds out")
    return Check(
        "place", name, State.PROBLEM if writes else State.NOTE, "ignored by the service",
        "two runs that write one name at once are not told apart, and gc --apply ends with 13"
        if writes else "gc compares each key again right before it deletes it",
        "run one at a time, or use a service that knows If-None-Match" if writes else "",
    )  # fmt: skip


def _refused(name: str, error: FtckptError) -> Check:
    denied = isinstance(error, DeniedError)
    what = {"writing": WRITING, "deleting": "gc, sync and transfers that go on after a kill"}
    return Check(
        "place", name, State.NOTE if denied and name == "writing" else State.PROBLEM,
        "not allowed" if denied else "fails",
        f"these fail here: {what.get(name, 'transfers to this place')}",
        error.hint or error.message,
    )  # fmt: skip


def _remove_probes(client: S3Client, root: S3Object, *, versioned: bool) -> None:
    """Remove what this run and killed ones left: keys, and versions of keys."""
    stem = f"{_below(root)}{TEMPORARY}"
    asked: dict[str, Any] = {"Bucket": root.bucket, "Prefix": stem}
    with suppress(FtckptError):  # without permission they stay
        page = client.run(_call(client, "list_objects_v2", root, "list", **asked))
        left = [item for item in page.get("Contents", ()) if _is_left(item, stem)]
        doomed = [Doomed(root._replace(key=item["Key"])) for item in left]
        if doomed:
            client.run(delete_objects(client, doomed))
    if not versioned:
        return
    with suppress(FtckptError):
        page = client.run(_call(client, "list_object_versions", root, "list", **asked))
        for item in [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]:
            if _is_ours(item, stem):
                place = {"Bucket": root.bucket, "Key": item["Key"]}
                with suppress(FtckptError):
                    client.run(
                        _call(client, "delete_object", root, "delete",
                              VersionId=item["VersionId"], **place)
                    )  # fmt: skip


def _is_ours(item: dict[str, Any], stem: str) -> bool:
    """Say whether a key is an empty one that a probe wrote."""
    name = str(item["Key"]).removeprefix(stem)
    return name.startswith(("doctor-", "probe-")) and not item.get("Size", 0)


def _is_left(item: dict[str, Any], stem: str) -> bool:
    """Say whether a killed doctor left a key; another's may be at work for some minutes."""
    age = time.time() - item["LastModified"].timestamp()
    return _is_ours(item, stem) and age > _OLD
