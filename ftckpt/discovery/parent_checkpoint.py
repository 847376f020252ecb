"""Find the checkpoint that a directory is one part of: a rank's, parameter's or optimizer's folder.

Such a directory looks like a root of a few files, or like a checkpoint of its own. The path
decides: a directory that holds nothing but that part is already a checkpoint, while one that holds
nothing but a step of a run, or a user's own folder, is not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial

from ftckpt.checkpoint import CommitState
from ftckpt.errors import FtckptError, UnsupportedError
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.remotes import split
from ftckpt.storage.store import Store

from .listing import listing_of_directory, recognise_at
from .recognise import Format, Listing, UnopenedPart, recognise
from .series import roles_in

# DeepSpeed's universal checkpoints keep a parameter's files two levels below.
_LEVELS = 2


def enclosing(url: str, store: Store, formats: Sequence[Format]) -> str:
    """Return the checkpoint around a directory, as a user would type it; "" for none.

    `store` is opened at the directory `url`.

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
        if level:  # on an object store only the place itself is checked
            if local is None:
                return ""
            store = open_store(f"{path}/{name}")
        above = split(path)[1]
        found = recognise(formats, _holding(name, listing_of_directory(store, ""), above))
        if found is not None and found[1].commit is not CommitState.UNCOMMITTED:
            is_relative = local is not None and not url.startswith(("/", "file:"))
            return os.path.relpath(path) if is_relative else path or "/"
    return ""


def as_its_root_says(
    url: str, formats: Sequence[Format], options: StoreOptions
) -> UnopenedPart | FtckptError | None:
    """Return what a directory that no format knows is in the root around it; None if nothing.

    Its siblings may tell that it is one of them, and has lost a part. What is named as a step and
    is none that is understood is an error there, and no root.
    """
    above, name = split(url.rstrip("/"))
    if not (re.search(r"\d", name) or roles_in(name)):
        return None
    from .candidates import look
    from .roots import names_in

    try:
        store = open_store(above, options)
        root = names_in(store, partial(recognise_at, store, formats=formats))
        own = next((c for c in root.candidates if c.path == name and not c.staging), None)
        child = None if own is None else root.recognise(own)
        if child is not None:
            return child.part
        if own is None or (own.step is None and root.parted_sibling(own) is None):
            return None
        looked = look(root, own)
    except FtckptError:
        return None  # the directory itself is there, and nobody asked for more
    error = None if looked is None else looked.error
    return error if isinstance(error, UnsupportedError) else None


def _holding(name: str, below: Listing, called: str) -> Listing:
    """Return the listing of a directory of the name `called` that holds only one directory."""

    def inside(asked: str) -> Listing:
        return {name: below}[asked]

    return Listing({}, frozenset({name}), lambda _, __: b"", inside, called=called)
