"""Find dropped checkpoints of an object-store root that are not freed yet.

Object stores have no rename, so a tombstone below `.ftckpt/trash/` marks a dropped entry, and its
data stay in place until they are freed. A tombstone is valid while nothing of the entry is younger:
a trainer that was set back saves the same step again, under the same keys, and that is not trash.
Both times are the store's own. A manifest that a seal wrote at that moment is not a save; one of
a transfer that was under way when its place was dropped, and that was finished since, is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from ftckpt.errors import FtckptError, NotFoundError
from ftckpt.own_files import FOLDER, MANIFEST, SUFFIX, TRANSFER
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.remotes import split
from ftckpt.storage.store import Entry, EntryKind, Store

TRASH = f"{FOLDER}/trash"

# Some answers of a store give whole seconds, others more.
_ROUNDING = 1.0

# Time, whether it is being freed, and its former name in the root.
_NAME = r"(?s)[0-9]{8}T[0-9]{6}\.[0-9]{6}Z[~!](.+)"


class Tomb(NamedTuple):
    """A dropped entry.

    Attributes:
        store: where it lies.
        path: of the tombstone, in the store.
        written: seconds since the epoch, by the store's clock.
    """

    store: Store
    path: str
    written: float

    def holds(self, files: Iterable[Entry]) -> bool:
        """Say whether an entry of these files is still what was dropped.

        Raises:
            UnavailableError, DeniedError: a manifest is younger, and the tombstone cannot be read.
        """
        late = []
        for file in files:
            if not is_record(file.path):
                if file.mtime is None or file.mtime > self.written + _ROUNDING:
                    return False
            elif file.mtime is None or file.mtime > self.written - _ROUNDING:
                late.append(file.path)
        return not (late and finished_since(self._listed(), late))

    def _listed(self) -> Iterator[str]:
        """Yield the keys that the tombstone lists; none of a damaged one, which frees nothing."""
        from ftckpt.strict_json import JsonError, decode

        with suppress(NotFoundError, JsonError, LookupError, TypeError):
            for row in decode(self.store.read(self.path))["files"]:
                yield str(row[0])


def finished_since(before: Iterable[str], now: Iterable[str]) -> list[str]:
    """Return the manifests of transfers that were under way when a listing was made, and are not.

    Args:
        before: the keys of that listing.
        now: the keys of a later one.
    """
    old = {*before}
    new = [path for path in now if path.rpartition("/")[2] == MANIFEST and path not in old]
    return [path for path in new if path.removesuffix(MANIFEST) + TRANSFER in old]


def is_record(path: str) -> bool:
    """Say whether a key of an entry is a manifest, which anybody may write at any time."""
    name = path.rpartition("/")[2]
    return name == MANIFEST or name.endswith(SUFFIX)


def read_tombs(store: Store, base: str, names: Iterable[str]) -> Mapping[str, Tomb]:
    """Return the tombstones of a root, by the name that the entry had there, the latest of each.

    Args:
        store: where the root lies.
        base: path of the root in the store.
        names: what lies directly in the root; without a trash nothing more is listed.

    Raises:
        UnavailableError, DeniedError: the trash could not be listed; nothing is concluded then.
    """
    if store.traits.local or FOLDER not in names:
        return {}
    folder = f"{base}/{TRASH}" if base else TRASH
    try:
        listed = store.children(folder)
    except NotFoundError:
        return {}
    found: dict[str, Tomb] = {}
    for entry in listed:
        match = re.fullmatch(_NAME, entry.path[len(folder) + 1 :])
        if match is None or entry.kind is not EntryKind.FILE or entry.mtime is None:
            continue
        if match[1] not in found or found[match[1]].written <= entry.mtime:
            found[match[1]] = Tomb(store, entry.path, entry.mtime)
    return found


def dropped_names(store: Store) -> set[str]:
    """Return the names that were dropped from the root at a store's URL, and can be restored.

    Raises:
        UnavailableError, DeniedError: the trash could not be listed.
    """
    try:
        listed = store.names(TRASH)
    except NotFoundError:
        return set()
    return {match[1] for name in listed if (match := re.fullmatch(_NAME, name)) is not None}


def dropped_instead(url: str, options: StoreOptions) -> NotFoundError | None:
    """Return that a checkpoint was dropped and is not freed yet; None if it was not, or is unknown.

    Asked where one in an object store could not be opened: its drop takes the commit marker away,
    which is neither damage nor a save that goes on, whatever a manifest says is missing.

    Args:
        url: of the checkpoint.
        options: how the root around it is reached.
    """
    parent, name = split(url.rstrip("/"))
    if not name or parent.endswith("://"):
        return None
    try:
        store = open_store(parent, options)
        if store.traits.local:
            return None
        tomb = read_tombs(store, "", [FOLDER]).get(name)
        if tomb is None or not tomb.holds(store.walk(name)):
            return None
    except FtckptError:
        return None
    return NotFoundError(
        f"{url} was dropped and is to be reclaimed",
        hint=shlex.join(["ftckpt", "gc", "undelete", parent, name]) + " has it back",
    )
