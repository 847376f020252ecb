"""The files of an entry: listed, summed up, and identified by one digest."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from ftckpt.errors import NotFoundError
from ftckpt.own_files import SUFFIX, is_own
from ftckpt.storage.store import Entry, EntryKind, Store

from .entries import EntryContents, SharedFile


def list_entry(store: Store, entry: Entry) -> list[Entry]:
    """Return every file of a directory at any depth, or a file and the manifest beside it.

    Links are returned as links, never followed.

    Raises:
        NotFoundError: it is gone.
    """
    if entry.kind is EntryKind.DIRECTORY and entry.link is None:
        return store.walk(entry.path)
    found = [store.stat(entry.path)]
    with suppress(NotFoundError):
        found.append(store.stat(entry.path + SUFFIX))
    return found


def count_names(store: Store, entry: Entry) -> int:
    """Return how many names lie directly in a directory; 1 for a file, 0 if it is gone."""
    if entry.kind is not EntryKind.DIRECTORY or entry.link is not None:
        return 1
    try:
        return len(store.names(entry.path))
    except NotFoundError:
        return 0


def sum_up(files: Sequence[Entry]) -> EntryContents:
    """Sum up files; a file with several names counts once, a link not at all."""
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
        linked=sum(f.size for f in files if f.link is not None),
        newest=max((t for f in files if (t := f.touched) is not None), default=None),
        fingerprint=fingerprint_of(files),
    )


def fingerprint_of(files: Sequence[Entry]) -> str:
    """Return the digest of a listing: BLAKE2b-128 over one line per file, sorted by path.

    A line is the representation of path, kind, size, modification time, version and link target.
    Before a plan is carried out, a new listing must have the same digest.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        identity = (file.path, str(file.kind), file.size, file.mtime, file.etag, file.link)
        digest.update(repr(identity).encode() + b"\n")
    return digest.hexdigest()


def fingerprint_but_targets(files: Sequence[Entry]) -> str:
    """Return `fingerprint_of` a listing without what is known of the targets of its links."""
    return fingerprint_of(
        [Entry(f.path, 0, link=f.link) if f.link is not None else f for f in files]
    )


def identity_of(files: Sequence[Entry], base: str) -> str:
    """Return a digest of the data files of `base`, which a seal does not change.

    Where a store marks content, undelete does not change it either.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        path = file.path[len(base) + 1 :]
        if not is_own(path) and not file.path.endswith(SUFFIX):
            digest.update(repr((path, file.size, file.etag or file.mtime)).encode() + b"\n")
    return digest.hexdigest()
