"""What lies in a root that no format knows: it may be a trainer's state, so the root is not empty.

A job starts from scratch beside an empty root. So only what surely holds no checkpoint counts as
nothing: our own files, logs, text, pictures, empty folders. Everything else is named.
"""

from __future__ import annotations

from collections.abc import Iterable

from ftckpt.errors import FtckptError, UnsupportedError
from ftckpt.findings import listed
from ftckpt.own_files import is_own
from ftckpt.storage.state_files import is_harmless, is_text
from ftckpt.storage.store import Entry, EntryKind, Store

from .roots import Root, is_never_one

# A folder with more names than these, or deeper ones, is not searched to its end.
_MOST_NAMES = 1000
_DEPTH = 4
# A text that is larger may be anything else further on.
_TEXT_SIZE = 1 << 20
_HEAD = 4096
_LISTED = 3


def not_understood(root: Root, hint: str = "") -> UnsupportedError | None:
    """Return the error for a root without a checkpoint that is not empty either; None if it is."""
    names = sorted(_strangers(root))
    if not names:
        return None
    shown = listed(names, _LISTED)
    what = "belongs" if len(names) == 1 else "belong"
    return UnsupportedError(
        f"{root.url} holds {shown}, which {what} to no known format",
        hint=hint
        or "docs/formats.md lists the formats; if a start from scratch is meant, use another root",
    )


def _strangers(root: Root) -> Iterable[str]:
    left = [_MOST_NAMES]
    for entry in root.store.children(root.base):
        name = entry.path.rpartition("/")[2]
        if not is_own(name) and not _is_nothing(root.store, entry, _DEPTH, left):
            yield name + "/" if entry.kind is EntryKind.DIRECTORY else name


def _is_nothing(store: Store, entry: Entry, depth: int, left: list[int]) -> bool:
    """Whether a file, or all that lies below a folder, is surely not a checkpoint's state."""
    name = entry.path.rpartition("/")[2]
    if is_never_one(name, entry):
        return True
    if entry.kind is EntryKind.FILE:
        return is_harmless(name) or not entry.size or _is_text(store, entry)
    if not depth:
        return False
    inside = store.children(entry.path)
    left[0] -= len(inside)
    return left[0] >= 0 and all(_is_nothing(store, one, depth - 1, left) for one in inside)


def _is_text(store: Store, entry: Entry) -> bool:
    if entry.size > _TEXT_SIZE or entry.archived:
        return False
    try:
        return is_text(store.read(entry.path, 0, min(_HEAD, entry.size)))
    except FtckptError:
        return False
