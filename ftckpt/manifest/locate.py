"""Find and read the manifest of a checkpoint."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ftckpt.errors import CorruptError, NotFoundError, UnsafeError
from ftckpt.manifest import MAX_BYTES, Manifest
from ftckpt.own_files import MANIFEST, SUFFIX
from ftckpt.storage.remotes import split
from ftckpt.storage.store import EntryKind

if TYPE_CHECKING:
    from ftckpt.storage import StoreOptions
    from ftckpt.storage.source import Source
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
