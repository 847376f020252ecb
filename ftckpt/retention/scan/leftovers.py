"""Temporary files of killed ftckpt runs in a root: report them, and remove old ones.

ftckpt writes under a name that `stores.is_leftover` knows, and renames or deletes it a moment
later. A file that is a day old belongs to no running process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from ftckpt.discovery.roots import Root
from ftckpt.errors import FtckptError, NotFoundError
from ftckpt.findings import counted
from ftckpt.retention.policy import GRACE
from ftckpt.retention.records import own_folder
from ftckpt.storage import is_leftover
from ftckpt.storage.store import Entry, EntryKind

WHY = "a run of ftckpt that was killed has left it; gc --apply and gc purge remove it after a day"


def leftovers(root: Root, now: float) -> list[Entry]:
    """Return leftovers of at least a day in a root and in its `.ftckpt`.

    Raises:
        UnavailableError, DeniedError: it could not be listed.
        UnsafeError: the root's `.ftckpt` is a link.
    """
    found = [e for e in root.store.children(root.base) if _is_ours(e, now)]
    with suppress(NotFoundError):
        found += [e for e in root.store.children(own_folder(root)) if _is_ours(e, now)]
    return found


def remove_leftovers(root: Root, now: float) -> Iterator[str]:
    """Remove leftovers of at least a day; yield what was done."""
    try:
        found = leftovers(root, now)
    except FtckptError:
        return  # nothing depends on them
    errors = [error for error in root.store.delete([e.path for e in found]).values() if error]
    if len(errors) < len(found):
        number = counted(len(found) - len(errors), "temporary file")
        yield f"removed {number} that killed runs of ftckpt had left in {root.url}"
    for error in errors:
        yield f"a temporary file of a killed run stays in {root.url}: {error}"


def _is_ours(entry: Entry, now: float) -> bool:
    plain = entry.kind is EntryKind.FILE and entry.link is None
    return (
        plain and is_leftover(entry.path) and entry.mtime is not None and now - entry.mtime >= GRACE
    )
