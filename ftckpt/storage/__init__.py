"""The stores: local files, memory, and everything that fsspec reaches."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ftckpt.errors import UsageError

from .options import StoreOptions
from .remotes import SCHEMES, named
from .secrets import withheld

if TYPE_CHECKING:
    from .store import Store

__all__ = ["StoreOptions", "open_store"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


_DEFAULTS = StoreOptions()


def open_store(url: str, options: StoreOptions = _DEFAULTS) -> Store:
    """Return the store of a path or URL; reads nothing yet.

    `url` is a local path, `file://…`, `memory://name`, `s3://bucket/prefix`, or any fsspec URL;
    `S3://` is `s3://` (RFC 3986, 3.1). `cold:name` is a place on the remote `cold`, which has its
    own settings (`remotes`). A password or a signature in it is used, and never shown (`secrets`).

    Raises:
        UsageError: the URL names no place, chains filesystems, or names an unknown remote.
        UnsupportedError: the package for this kind of URL is not installed.
    """
    url = withheld(url)
    found = named(url)
    if found is None:
        store = _opened(url, options)
    else:
        remote, rest = found
        store = _opened(remote.place(rest), remote.options(options))
        if not store.traits.local:
            # The name identifies the service; the URL alone may be another one's bucket.
            store.url = f"{remote.name}:{rest.lstrip('/')}"
    store.options = options
    return store


def _opened(url: str, options: StoreOptions) -> Store:
    if not url:
        raise UsageError("an empty path names no checkpoint")
    match = _SCHEME.match(url)
    scheme = match[1].lower() if match else ""
    url = scheme + url[len(scheme) :]
    if scheme in ("", "file", "local"):
        from ftckpt.storage.local.store import LocalStore

        slip = None if scheme else re.match(r"([a-z0-9]+)//(?=[^/])", url)
        if slip is not None and slip[1] in SCHEMES and not os.path.lexists(slip[1]):
            meant = f"{slip[1]}://{url[slip.end() :]}"
            raise UsageError(
                f"{url} is neither a URL nor a path", hint=f"a URL has a colon: {meant}"
            )
        if not scheme and re.match(r"[A-Za-z0-9+.-]+::[A-Za-z0-9+.-]*(://|$)", url):
            raise UsageError(f"{url} chains filesystems; a cache in between cannot be trusted")
        return LocalStore(url.removeprefix("local://") if scheme == "local" else url)
    if scheme == "memory":
        from .memory import MemoryStore

        return MemoryStore(url)
    from ftckpt.storage.fsspec.store import open_remote

    return open_remote(url, scheme, options)
