"""Find and read the manifest of a checkpoint.

Tell a checkpoint that gc has thinned: it holds the weights alone, and no run goes on from it.

Its manifest says so, wherever it was copied to and whatever it is called. A directory that has the
name of such a checkpoint (`ftckpt.own_files.WEIGHTS`) counts as one without its manifest, too.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ftckpt.errors import CorruptError, NotFoundError, UnsafeError, UnsupportedError
from ftckpt.manifest import MAX_BYTES, SCHEMA_THINNED, Manifest, ThinnedFrom
from ftckpt.own_files import MANIFEST, SUFFIX, weights_of
from ftckpt.storage.remotes import split
from ftckpt.storage.source import Source
from ftckpt.storage.store import EntryKind

if TYPE_CHECKING:
    from ftckpt.storage import StoreOptions
    from ftckpt.storage.store import Entry, Store


def beside(source: Source) -> str:
    """Return the store's path of the manifest that belongs to `source`."""
    if source.single:
        return source.path(next(iter(source.entries)) + SUFFIX)
    return source.path(MANIFEST)


def read(store: Store, path: str) -> Manifest:
    """Return the manifest stored under `path`.

    Raises:
        NotFoundError: it does not exist.
        CorruptError, UnsupportedError, UnsafeError: see `ftckpt.manifest.parse.parse_manifest`.
    """
    return _read(store, path, store.stat(path))


def _read(store: Store, path: str, entry: Entry) -> Manifest:
    name = path.rpartition("/")[2] or split(store.url.rstrip("/"))[1]
    if entry.kind is EntryKind.SPECIAL:
        raise UnsafeError(f"{name} is not a regular file", kind="special-file", file=name)
    if entry.kind is not EntryKind.FILE:
        raise NotFoundError(f"{store.describe(path)} is not a file")
    if entry.size > MAX_BYTES:
        raise CorruptError(
            f"{name} is not a valid manifest: it has {entry.size} bytes and {MAX_BYTES} is most",
            kind="bad-manifest",
            file=name,
        )
    from .parse import parse_manifest

    return parse_manifest(store.read(path, 0, entry.size), name)


def read_at(url: str, options: StoreOptions) -> Manifest | None:
    """Return the manifest at a path or URL; None for "".

    Raises:
        NotFoundError, CorruptError, UnsupportedError, UnsafeError: see `read`.
    """
    if not url:
        return None
    from ftckpt.storage import open_store

    parent, name = split(url)
    return read(open_store(parent, options), name)


def find(source: Source) -> Manifest | None:
    """Return the manifest beside the data of `source`, or None.

    In a directory the listing gives its size, so it takes one request.

    Raises:
        CorruptError, UnsupportedError, UnsafeError: see `ftckpt.manifest.parse.parse_manifest`.
    """
    listed = None if source.single else source.entries.get(MANIFEST)
    if listed is None and not source.single:
        return None
    path = beside(source)
    with suppress(CorruptError, NotFoundError):  # another one may have been written since
        if listed is not None:
            return _read(source.store, path, listed)
    try:
        return read(source.store, path)
    except NotFoundError:
        return None


_HEAD = 64
WEIGHTS_ALONE = "holds the weights alone: gc has thinned it"


def is_thinned(source: Source) -> bool:
    """Say whether a checkpoint holds the weights alone; reads the head of its manifest at most.

    Raises:
        UnavailableError, DeniedError: its manifest could not be read.
    """
    if not source.single and weights_of(source.name):
        return True
    if not source.single and MANIFEST not in source.entries:
        return False
    try:
        head = source.store.read(beside(source), 0, _HEAD)  # no manifest is shorter
    except (NotFoundError, CorruptError, UnsafeError):
        return False  # who checks it says what is wrong with it
    return f'"schema": "{SCHEMA_THINNED}"'.encode() in head


def thinned_manifest(source: Source) -> Manifest | None:
    """Return its manifest, if that records of which checkpoint it holds the weights; or None.

    Raises:
        UnavailableError, DeniedError: its manifest could not be read.
    """
    try:
        manifest = find(source) if is_thinned(source) else None
    except (CorruptError, UnsafeError, UnsupportedError):
        return None
    return None if manifest is None or manifest.thinned is None else manifest


def thinned_from(source: Source) -> ThinnedFrom | None:
    """Return what its manifest records of the checkpoint that was thinned; None without a record.

    Raises:
        UnavailableError, DeniedError: its manifest could not be read.
    """
    manifest = thinned_manifest(source)
    return None if manifest is None else manifest.thinned
