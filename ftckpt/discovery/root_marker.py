"""Tell an empty root from a missing one.

An unmounted mount point is an empty directory, and object stores do not distinguish an empty prefix
from a mistyped one. So a root without checkpoints counts as a first start only with the marker
`.ftckpt/root.json`, which `--create-root` writes once.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator

from ftckpt.errors import MissingError, NotFoundError, UnsafeError, UsageError
from ftckpt.own_files import FOLDER
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.store import EntryKind, Store, join
from ftckpt.storage.suggestions import hint_for_place

from .roots import Root

NAME = f"{FOLDER}/root.json"
_TEXT = b'{"schema": "ftckpt.root/1"}\n'
# Names that ftckpt writes into a root only after it has seen a checkpoint there.
_SEEN = ("passed.json", "log.jsonl", "log", "verdicts", "pins")
_FSTAB = "/etc/fstab"
_ESCAPED = re.compile(r"\\([0-7]{3})")


def create_root(url: str, options: StoreOptions) -> None:
    """Mark a place as the root of a run; a local directory is created if its parent exists.

    Raises:
        MissingError: the parent directory or the bucket does not exist, or /etc/fstab lists a
            filesystem there that is not mounted.
        UsageError: the place is a file.
        DeniedError, NoResourceError, UnavailableError: the marker could not be written.
    """
    store = open_store(url, options)
    path = store.local_path()
    if path is not None:
        lost = unmounted(path)
        if lost:
            raise MissingError(f"{url} cannot be created: {lost}", hint=f"mount {lost.split()[0]}")
        if os.path.lexists(path) and not os.path.isdir(path):
            raise UsageError(f"{url} is a file, not a root")
        parent = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(parent):
            raise MissingError(
                f"{url} cannot be created: {parent} does not exist", hint=hint_for_place(path)
            )
    if is_marked(store, ""):
        return
    if path is not None and os.path.islink(os.path.join(path, FOLDER)):
        raise UnsafeError(f"{FOLDER} of {url} is a link: it was not made by ftckpt")
    try:
        store.put(NAME, _TEXT)
    except NotFoundError as error:  # the bucket
        raise MissingError(error.message, hint=error.hint) from error


def is_marked(store: Store, base: str) -> bool:
    """Whether the root at `base` in the store has the marker.

    Raises:
        UnavailableError, DeniedError: the storage does not answer.
    """
    return _holds(store, base, NAME.rpartition("/")[2])


def absence(root: Root) -> tuple[bool, str, str]:
    """Explain a root without checkpoints.

    Returns:
        Whether it surely exists and never held a checkpoint, the reason as a sentence, and the next
            action.

    Raises:
        UnavailableError, DeniedError: see `is_marked`.
    """
    local = root.store.local_path(root.base)
    mount = unmounted(local) if local is not None else ""
    if mount:
        return False, f"{root.url} is not there: {mount}", f"mount {mount.split()[0]}"
    if is_marked(root.store, root.base):
        return True, f"{root.url} holds no checkpoint yet", ""
    return (
        False,
        f"{root.url} holds no checkpoint, and nothing shows that it is the root: it may not be "
        "mounted, or be mistyped",
        f"for a first start, once: {shlex.join(['ftckpt', 'latest', root.url, '--create-root'])}",
    )


def lost(root: Root) -> str:
    """Return the evidence that an empty root once held a checkpoint; "" without any.

    Raises:
        UnavailableError, DeniedError: see `is_marked`.
    """
    for pointer in root.pointers:
        if pointer.says and (pointer.target is None or pointer.step is not None):
            return f"{pointer.name} says {pointer.says!r}"
    for name in _SEEN:
        if _holds(root.store, root.base, name, EntryKind.FILE, EntryKind.DIRECTORY):
            return f"{FOLDER}/{name} tells of checkpoints"
    return ""


def _holds(store: Store, base: str, name: str, *kinds: EntryKind) -> bool:
    """Whether the root's `.ftckpt` holds a name of one of the kinds (default: a file)."""
    try:
        # ftckpt makes no links, and a link's target says nothing about this root.
        if store.traits.local and store.stat(join(base, FOLDER)).link is not None:
            return False
        found = store.stat(join(base, f"{FOLDER}/{name}"))
    except NotFoundError:
        return False
    return found.link is None and found.kind in (kinds or (EntryKind.FILE,))


def unmounted(path: str) -> str:
    """Return a sentence about an unmounted filesystem of /etc/fstab at or above a path, or "".

    It begins with the mount point. Only fstab is read: mounts of systemd units, autofs or a
    container runtime are unknown.
    """
    real = os.path.realpath(path)
    for mount in _fstab():
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and mount != "/" and not os.path.ismount(mount):
            return f"{mount} is in {_FSTAB} and is not mounted"
    return ""


def _fstab() -> Iterator[str]:
    try:
        with open(_FSTAB, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read(1 << 20).splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) >= 2 and not line.lstrip().startswith("#") and fields[1].startswith("/"):
            yield _ESCAPED.sub(lambda m: chr(int(m[1], 8)), fields[1])
