"""Marks of what built files hold: where one has changed, what was proven before says nothing now.

An object store has marks of its own. A file of this machine has its times, which a server of files
sets by its own clock, and its inode's number, which all its clients see: so two machines that look
at one file make one mark.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress

from ftckpt.errors import FtckptError, NotFoundError
from ftckpt.storage.store import Store


def marks_of(store: Store, paths: Iterable[str]) -> dict[str, str]:
    """Return marks that change with files, by path; to be asked for before they are read.

    Where a file has none, it is "", which says nothing.

    Args:
        store: where they lie.
        paths: the files.

    Raises:
        UnavailableError, DeniedError: an object store does not answer.
    """
    wanted = sorted(set(paths))
    if store.traits.local:
        return {path: _times_of(store, path) for path in wanted}
    listed: dict[str, str] = {}
    with suppress(NotFoundError):
        listed = {entry.path: entry.etag or "" for entry in store.walk("")}
    return {path: listed.get(path, "") for path in wanted}


def same(marks: object, now: Mapping[str, str]) -> bool:
    """Say whether files have the marks that a record says."""
    return isinstance(marks, dict) and all(
        bool(mark) and now.get(file) == mark for file, mark in marks.items()
    )


def _times_of(store: Store, path: str) -> str:
    # Opened, because a client of NFS asks its server for the times then.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        number = os.open(store.local_path(path) or "", flags)
    except (FtckptError, OSError):
        return ""
    try:
        found = os.fstat(number)
    finally:
        os.close(number)
    if not stat.S_ISREG(found.st_mode):
        return ""
    return f"{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}:{found.st_ino}"
