"""The append-only log of a root: who dropped what, when, and why.

A local root has one file, `.ftckpt/log.jsonl`, one JSON object per line. Object stores cannot
append, so each event is an object below `.ftckpt/log/`, named by its time. Other logs of a root
(`LogName`) are written the same way.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

from ftckpt.discovery.roots import Root
from ftckpt.errors import (
    CorruptError,
    NoResourceError,
    NotFoundError,
    UnavailableError,
    UnsafeError,
)
from ftckpt.retention.records import own_folder
from ftckpt.storage.local.atomic import make_directories
from ftckpt.storage.local.oserror import translate, twice
from ftckpt.storage.local.ownership import open_or_make
from ftckpt.strict_json import JsonError, decode

SCHEMA = "ftckpt.log/1"
_NEVER = 1e11  # in the year 5138
# The end of a log is read: no run fills so much in years, and anybody may have made it longer.
_MOST_BYTES = 16 << 20


class LogName(NamedTuple):
    """Where a log lies below `.ftckpt`, and what its events are.

    Attributes:
        file: in a local root.
        folder: in an object store.
        schema: of each event.
    """

    file: str
    folder: str
    schema: str


OF_ROOT = LogName("log.jsonl", "log", SCHEMA)
APPLYING, APPLIED, PURGED, UNDELETED = "applying", "applied", "purged", "undeleted"


def append(
    root: Root, event: str, now: float, fields: Mapping[str, object], name: LogName = OF_ROOT
) -> None:
    """Add one event (`applying`, `applied`, `purged`, `undeleted`), durably.

    `now` is in seconds since the epoch; `fields` are JSON; `name` says in which log.

    Raises:
        NoResourceError, DeniedError, UnavailableError: it could not be written.
        UnsafeError: the root's `.ftckpt`, or the file, is a link.
    """
    head = {"schema": name.schema, "time": now, "event": event}
    line = json.dumps({**head, **fields}, ensure_ascii=True).encode() + b"\n"
    folder = own_folder(root)
    local = root.store.local_path(folder)
    if local is not None:
        _append(os.path.join(local, name.file), line)
        return
    import secrets

    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    root.store.put(f"{folder}/{name.folder}/{stamp}-{secrets.token_hex(4)}.json", line)


def append_if_room(root: Root, event: str, now: float, fields: Mapping[str, object]) -> bool:
    """Add one event (see `append`); return False if the filesystem is full.

    A full disk needs gc most, so a missing log line must not stop it.
    """
    try:
        append(root, event, now, fields)
    except NoResourceError:
        return False
    return True


def read(root: Root, name: LogName = OF_ROOT, newest: int | None = None) -> list[dict[str, object]]:
    """Return the events of the last 16 MiB, the earliest first, without damaged or cut lines.

    `newest` limits the number of objects that are read, the last ones, in an object store.

    Raises:
        UnavailableError, DeniedError: it could not be read.
    """
    folder = own_folder(root)
    lines: list[bytes] = []
    for path, size in _paths(root, folder, name, newest):
        try:
            size = root.store.stat(path).size if size is None else size
            first = max(0, size - _MOST_BYTES)
            told = root.store.read(path, first, size - first)
            lines += (told.partition(b"\n")[2] if first else told).splitlines()
        except NotFoundError:
            continue
        except CorruptError as error:  # it grew or shrank while it was read
            raise UnavailableError(
                f"{root.store.describe(path)} changed while it was read"
            ) from error
    return sorted((e for e in map(_event, lines) if e is not None), key=_time)


def last_applied(root: Root) -> float | None:
    """Return when rules were last carried out here, in seconds since the epoch; None if never.

    What a person has dropped by name says nothing of what the rules have let pile up.
    """
    by_rules = (e for e in read(root) if e.get("event") == APPLIED and not e.get("named"))
    return max(map(_time, by_rules), default=None)


def last_time(root: Root) -> float | None:
    """Return the time of the last event, in seconds since the epoch; None if there is none."""
    return max(map(_time, read(root)), default=None)


def _append(path: str, line: bytes) -> None:
    """Append a line in one write, which other appenders cannot interleave."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        twice(lambda: make_directories(os.path.dirname(path)))
        fd = twice(lambda: open_or_make(path, flags))
        try:
            size = os.fstat(fd).st_size
            # A line that a kill or a full disk has cut off must not spoil this one.
            torn = size and os.pread(fd, 1, size - 1) != b"\n"
            rest = memoryview(b"\n" + line if torn else line)
            while rest:
                rest = rest[twice(partial(os.write, fd, rest)) :]
            twice(lambda: os.fsync(fd))
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno == errno.ELOOP:
            message = f"{path} is a link: it was not made by ftckpt"
            raise UnsafeError(message, kind="special-file", file=os.path.basename(path)) from error
        raise translate(error, path, "append to") from error


def _paths(
    root: Root, folder: str, name: LogName, newest: int | None
) -> list[tuple[str, int | None]]:
    """Return the files of a log, each with its size where a listing has told it."""
    file: tuple[str, int | None] = (f"{folder}/{name.file}", None)
    try:
        events = sorted((e.path, e.size) for e in root.store.walk(f"{folder}/{name.folder}"))
    except NotFoundError:
        return [file]
    return [file, *(events if newest is None else events[-newest:])]


def _event(line: bytes) -> dict[str, object] | None:
    try:
        found = decode(line)
    except JsonError:
        return None
    if not isinstance(found, dict) or type(found.get("time")) not in (int, float):
        return None
    return found if abs(found["time"]) < _NEVER else None


def _time(event: Mapping[str, object]) -> float:
    time = event["time"]
    assert isinstance(time, (int, float))
    return float(time)
