"""Tell an empty root from a missing one.

An unmounted mount point is an empty directory, and object stores do not distinguish an empty prefix
from a mistyped one. So a root without checkpoints counts as a first start only with the marker
`.ftckpt/root.json`, which `--create-root` writes once.

What lies in a root that no format knows: it may be a trainer's state, so the root is not empty.

A job starts from scratch beside an empty root. So only what surely holds no checkpoint counts as
nothing: our own files, logs, text, pictures, empty folders, and what desktops and tools leave under
names of their own. Everything else is named, whatever it is called: that no checkpoint has such a
name says nothing about what is in it (DCP's own files are `.metadata` and `__0_0.distcp`).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator

from ftckpt.errors import (
    FtckptError,
    MissingError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from ftckpt.findings import listed
from ftckpt.own_files import FOLDER, MANIFEST, SUFFIX, is_own
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.state_files import is_harmless, is_text, may_hold_tensors
from ftckpt.storage.store import Entry, EntryKind, Store, join
from ftckpt.storage.suggestions import hint_for_place

from .listing import open_part
from .recognise import UnopenedPart
from .roots import LOST_AND_FOUND, PIECES, Root
from .step_names import SUFFIXES

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


# A folder with more names than these, or deeper ones, is not searched to its end.
_MOST_NAMES = 1000
_DEPTH = 4
# A text that is larger may be anything else further on.
_TEXT_SIZE = 1 << 20
_HEAD = 4096
_LISTED = 3
# Folders of one level that are searched for something to read.
_SEARCHED = 8
# Hidden names of version control, editors, desktops and caches; and of a storage's own snapshots.
_TOOLS = re.compile(
    r"\.(?:git|svn|hg|venv|cache|vscode|idea|ipynb_checkpoints|pytest_cache|mypy_cache|ruff_cache"
    r"|Trash.*|snapshots?|zfs|DS_Store|_.*|.*\.sw[a-p]|nfs[0-9a-f]+|fuse_hidden[0-9a-f]+)"
)
# What tells of a save by its name alone, whose data may lie elsewhere or be lost.
_INDEX = ".index.json"


def not_understood(root: Root, hint: str = "") -> UnsupportedError | None:
    """Return the error for a root without a checkpoint that is not empty either; None if it is."""
    found = sorted(_strangers(root), key=lambda one: one[0])
    if not found:
        return None
    shown = listed([name for name, _ in found], _LISTED)
    pieces = root.memo.get(PIECES, frozenset())
    if pieces and all(name in pieces or entry.kind is EntryKind.FILE for name, entry in found):
        said = listed(sorted(pieces), _LISTED)
        return UnsupportedError(
            f"{root.url} holds {said}: by their names each is one rank's piece of a save, in a"
            " layout that is not known",
            hint=hint
            or "docs/formats.md lists the formats; the program that wrote them reads them",
        )
    read = next((path for _, one in found[:_LISTED] if (path := _readable(root, one))), "")
    if read:
        url = root.store.describe(read)
        folder = read.rpartition("/")[0]
        inside = f" or {root.store.describe(folder)}" if folder != root.base else ""
        return UnsupportedError(
            f"{root.url} holds {shown}: their names do not say which are its saves; {url} can be "
            "read by itself",
            hint=f"name {url}{inside}",
        )
    what = "belongs" if len(found) == 1 else "belong"
    return UnsupportedError(
        f"{root.url} holds {shown}, which {what} to no known format",
        hint=hint
        or "docs/formats.md lists the formats; if a start from scratch is meant, use another root",
    )


def _readable(root: Root, entry: Entry) -> str:
    """Return the path of the first thing at or below a stranger that a format reads; "" if none.

    Each level is searched in its first folder that may hold anything.
    """
    try:
        for _ in range(_DEPTH):
            part = root.ask(entry)
            if part is not None:
                return entry.path if _opens(root, part) else ""
            if entry.kind is not EntryKind.DIRECTORY:
                return ""
            inside = sorted(root.store.children(entry.path), key=lambda one: one.path)
            files = [one for one in inside if one.kind is EntryKind.FILE]
            for one in [f for f in files if f.path.endswith(SUFFIXES)][:_LISTED]:
                part = root.ask(one)
                if part is not None and _opens(root, part):
                    return one.path
            folders = [one for one in inside if one.kind is EntryKind.DIRECTORY][:_SEARCHED]
            left = [_MOST_NAMES]
            further = [one for one in folders if not _is_nothing(root.store, one, _DEPTH, left)]
            if not further:
                return ""
            entry = further[0]
    except FtckptError:
        return ""
    return ""


def _opens(root: Root, part: UnopenedPart) -> bool:
    """Whether a format reads it, which its name only promises."""
    try:
        return part.recognition.supported and open_part(root.store, part) is not None
    except FtckptError:
        return False


def _strangers(root: Root) -> Iterable[tuple[str, Entry]]:
    left = [_MOST_NAMES]
    for entry in root.store.children(root.base):
        name = entry.path.rpartition("/")[2]
        if not is_own(name) and not _is_nothing(root.store, entry, _DEPTH, left):
            yield name + "/" if entry.kind is EntryKind.DIRECTORY else name, entry


def _is_nothing(store: Store, entry: Entry, depth: int, left: list[int]) -> bool:
    """Whether a file, or all that lies below a folder, is surely not a checkpoint's state."""
    name = entry.path.rpartition("/")[2]
    if entry.dangling:
        return False  # to a disk that is not mounted, perhaps
    if entry.kind is EntryKind.SPECIAL or name == LOST_AND_FOUND or _TOOLS.fullmatch(name):
        return True
    if entry.kind is EntryKind.FILE:
        if may_hold_tensors(name) or name == MANIFEST or name.endswith((SUFFIX, _INDEX)):
            return False
        harmless = is_harmless(name) and not name.startswith(".")
        return harmless or not entry.size or _is_text(store, entry)
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
