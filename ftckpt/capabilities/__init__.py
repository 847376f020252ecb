"""What this machine and a place can do, found by trying it."""

from __future__ import annotations

from collections.abc import Iterator

from ftckpt.storage import open_store
from ftckpt.storage.options import StoreOptions

from .machine import Check as Check
from .machine import State as State

_DEFAULTS = StoreOptions()


def examine(root: str = "", *, stores: StoreOptions = _DEFAULTS) -> Iterator[Check]:
    """Yield what this machine can do, and a place if one is given.

    A place is tried by files of our own with names that no reader takes for a checkpoint. They are
    removed at the end, and those of killed runs too.

    Args:
        root: a directory or URL; "" for the machine alone.
        stores: settings of object stores.

    Raises:
        NotFoundError: the place does not exist.
        UsageError: it is a file, or names no place.
        DeniedError, UnavailableError: nothing of it can be read.
        MissingPackageError: the package for this kind of URL is not installed.
    """
    from .machine import examine_machine

    store = open_store(root, stores) if root else None
    yield from examine_machine()
    if store is None:
        return
    if store.traits.local:
        from .directory import examine_directory

        yield from examine_directory(store.local_path("") or root)
        return
    from ftckpt.storage.s3.store import S3Store

    from .bucket import examine_bucket, examine_other

    yield from examine_bucket(store) if isinstance(store, S3Store) else examine_other(store)
