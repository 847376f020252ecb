"""The files of an entry: listed, summed up, and identified by one digest."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from ftckpt.errors import NotFoundError
from ftckpt.own_files import SUFFIX
from ftckpt.storage.store import Entry, EntryKind, Store

from .entries import EntryContents, SharedFile


def list_entry(store: Store, entry: Entry) -> list[Entry]:
    """Return every file of a directory at any depth, or a file and the manifest beside it.

    Links come as what they are, never as what they lead to.

    Raises:
        NotFoundError: it is not there any more.
    """
    if entry.kind is EntryKind.DIRECTORY and entry.link is None:
        return store.walk(entry.path)
    found = [store.stat(entry.path)]
    with suppress(NotFoundError):
        found.append(store.stat(entry.path + SUFFIX))
    return found


def count_names(store: Store, entry: Entry) -> int:
    """Return how many names an entry has: a directory those directly in it, a file its own.

    What is gone has none.
    """
    if entry.kind is not EntryKind.DIRECTORY or entry.link is not None:
        return 1
    try:
        return len(store.names(entry.path))
    except NotFoundError:
        return 0


def sum_up(files: Sequence[Entry]) -> EntryContents:
    """Return what a plan remembers of files; a file of several names counts once.

    A link counts nothing: what it leads to stays where it is.
    """
    here: Counter[str] = Counter()
    held: dict[str, tuple[int, int]] = {}
    unshared = 0
    for file in files:
        if file.link is not None:
            continue
        if file.shared is None:
            unshared += file.size
        else:
            inode, links = file.shared
            here[inode] += 1
            held[inode] = file.size, links
    shared = tuple(SharedFile(inode, *held[inode], here[inode]) for inode in sorted(held))
    return EntryContents(
        files=len(files),
        nbytes=unshared + sum(file.size for file in shared),
        unshared=unshared,
        shared=shared,
        newest=max((f.mtime for f in files if f.mtime is not None), default=None),
        fingerprint=fingerprint_of(files),
    )


def fingerprint_of(files: Sequence[Entry]) -> str:
    """Return the digest of a listing: BLAKE2b-128 over one line a file, sorted by path.

    A line is the representation of path, kind, size, modification time, version and link target.
    Before a plan is carried out, files are listed again and compared: what has changed is not what
    was judged.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        identity = (file.path, str(file.kind), file.size, file.mtime, file.etag, file.link)
        digest.update(repr(identity).encode() + b"\n")
    return digest.hexdigest()
