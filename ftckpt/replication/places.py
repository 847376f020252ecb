"""Place a replica: its name in a directory, and the staging place that builds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ftckpt.checkpoint import Checkpoint
from ftckpt.discovery.resolve import files_at
from ftckpt.errors import FtckptError, RefusedError
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.source import Source
from ftckpt.storage.store import Store
from ftckpt.transfer.places import (
    absolute,
    around,
    name_of,
    place_of,
    require_apart,
    require_apart_from_all,
    staging_name,
)
from ftckpt.transfer.staging import Staging
from ftckpt.transfer.staging.local import LocalStaging


def destination_of(source: Source, destination: str) -> str:
    """Return where the replica stands: `DIR/` means the source's own name inside of DIR.

    The slash decides and not what is there, so that a run that is started again means the same.
    """
    if not destination.endswith("/"):
        return destination
    return destination + name_of(place_of(source))


def staging_at(
    source: Source, destination: str, stores: StoreOptions, *, by_parts: bool = False
) -> Staging:
    """Return the staging place of a replica.

    Args:
        source: what is copied; a replica of one file is one file.
        destination: its path or URL.
        stores: how to reach object stores.
        by_parts: whether several machines write it: then others must read it before it is shown.

    Raises:
        RefusedError: the destination lies inside the source, or around it.
        UsageError: one file would take the name of a bucket.
    """
    store = open_store(destination, stores)
    require_apart(source, store)
    if store.traits.local:
        return LocalStaging(absolute(store), single=source.single)
    if not source.single:
        from ftckpt.transfer.staging.remote import RemoteStaging

        return RemoteStaging(store)
    beside, name = around(destination), name_of(destination)
    if by_parts:
        from ftckpt.transfer.staging.staged_object import StagedObject

        staged = open_store(beside + staging_name(name), stores)
        return StagedObject(open_store(beside, stores), name, staged)
    from ftckpt.transfer.staging.object import ObjectStaging

    return ObjectStaging(open_store(beside, stores), name)


def require_apart_from_bases(opened: Callable[[], Checkpoint], destination: Store) -> None:
    """Refuse a destination inside what a checkpoint's tensors are decoded from, as far as known.

    Args:
        opened: opens the checkpoint; what cannot be opened is told of elsewhere.
        destination: where it goes.

    Raises:
        RefusedError: it lies inside one, or one where it is built.
    """
    try:
        require_apart_from_all(opened(), destination)
    except RefusedError:
        raise
    except FtckptError:
        return


def standing_at(destination: str, stores: StoreOptions) -> Source:
    """List what stands at a destination.

    Raises:
        NotFoundError: nothing does.
    """
    return files_at(destination, (), stores)


def plan_of(source: Source, names: Iterable[str], result: object) -> str:
    """Return the fingerprint of all that decides the bytes of a replica.

    Args:
        source: as it was listed.
        names: of its files that are read.
        result: what is made of them; its `repr` counts.
    """
    import xxhash

    entries = ((name, source.entries.get(name)) for name in sorted(names))
    seen = [(name, entry and (entry.size, entry.mtime, entry.etag)) for name, entry in entries]
    digest: str = xxhash.xxh3_128_hexdigest(repr((place_of(source), seen, result)).encode())
    return digest


def is_local(destination: str, stores: StoreOptions) -> bool:
    """Say whether a path or URL is on this machine."""
    return open_store(destination, stores).traits.local
