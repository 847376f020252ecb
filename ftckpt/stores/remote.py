"""Everything that fsspec reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.errors import UnsupportedError

if TYPE_CHECKING:
    from ftckpt.store import Store

    from .options import StoreOptions


def open_remote(url: str, scheme: str, options: StoreOptions) -> Store:
    """Return the store for a URL of an object store."""
    raise UnsupportedError(f"{scheme}:// is not supported ({url}, {options})")
