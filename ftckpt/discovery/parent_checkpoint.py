"""The checkpoint that a directory is one part of: a rank's folder, a parameter's, an optimizer's.

Such a directory looks like a root of a few files, or like a checkpoint of its own. What tells is
the way to it: a directory that holds nothing but that part is a checkpoint already, while one that
holds nothing but a step of a run, or a folder of somebody's own, is none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ftckpt.checkpoint import CommitState
from ftckpt.storage import open_store
from ftckpt.storage.remotes import split
from ftckpt.storage.store import Store

from .listing import listing_of_directory
from .recognise import Format, Listing, recognise

# DeepSpeed's universal checkpoints keep a parameter's files two levels below.
_LEVELS = 2


def enclosing(url: str, store: Store, formats: Sequence[Format]) -> str:
    """Return the checkpoint that a directory is a part of, as a user would type it; "" for none.

    Args:
        url: of the directory, as typed.
        store: opened there.
        formats: in asking order.

    Raises:
        FtckptError: it cannot be listed.
    """
    local = store.local_path()
    path = url.rstrip("/") if local is None else os.path.abspath(local)
    for level in range(_LEVELS):
        if path in ("", "/") or path.endswith(("://", ":")):
            return ""
        path, name = split(path)
        if path.endswith(":/"):
            return ""
        if level:  # an object store is asked about the place itself alone
            if local is None:
                return ""
            store = open_store(f"{path}/{name}")
        found = recognise(formats, _holding(name, listing_of_directory(store, "")))
        if found is not None and found[1].commit is not CommitState.UNCOMMITTED:
            is_relative = local is not None and not url.startswith(("/", "file:"))
            return os.path.relpath(path) if is_relative else path or "/"
    return ""


def _holding(name: str, below: Listing) -> Listing:
    """Return the listing of a directory that holds nothing but one directory."""

    def inside(asked: str) -> Listing:
        return {name: below}[asked]

    return Listing({}, frozenset({name}), lambda _, __: b"", inside)
