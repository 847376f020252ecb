"""The folder of a model in the cache of the Hugging Face Hub, which people name.

    models--ORG--NAME/refs/main          the commit that was fetched last
    models--ORG--NAME/snapshots/COMMIT/  the files of it, as links
    models--ORG--NAME/blobs/             what they lead to, by digest

Source: huggingface_hub, `docs/source/en/guides/manage-cache.md`.
"""

from __future__ import annotations

import os
import re

from ftckpt.errors import CorruptError, NotFoundError, UnsafeError, UsageError
from ftckpt.findings import listed
from ftckpt.storage.remotes import split
from ftckpt.storage.source import safe_name
from ftckpt.storage.store import EntryKind, Store

_FOLDER = re.compile(r"(?:models|datasets|spaces)--[^/]+")
_SNAPSHOTS, _MAIN = "snapshots", "refs/main"
_MAX_COMMIT = 256  # bytes


def snapshot_of(store: Store, url: str) -> str:
    """Return the path of the files that a model's folder in a hub's cache stands for.

    Args:
        store: opened at a directory.
        url: of the directory.

    Returns:
        Relative to the directory; "" for any other directory.

    Raises:
        CorruptError: `refs/main` names a commit that is not there (`pointer-dangling`).
        UnsafeError: `refs/main` or the snapshot is reached by a link: the cache has none above the
            files of a snapshot, and a link may lead to anything that the user can read.
        UsageError: several snapshots, and nothing says which is meant.
    """
    here = store.local_path("")
    whole = url if here is None else os.path.abspath(here)
    if not _FOLDER.fullmatch(split(whole.rstrip("/"))[1]):
        return ""
    try:
        found = store.children(_SNAPSHOTS)
    except NotFoundError:
        return ""
    commits = [e.path.rpartition("/")[2] for e in found if e.kind is EntryKind.DIRECTORY]
    try:
        main = store.stat(_MAIN)
        _require_inside(store, _MAIN)
        size = min(main.size, _MAX_COMMIT)
        said = store.read(_MAIN, 0, size).decode("ascii", "replace").strip()
    except NotFoundError:
        if len(commits) > 1:
            message = f"{store.describe('')} holds {len(commits)} snapshots, and no {_MAIN}"
            hint = f"name one: {listed([f'{_SNAPSHOTS}/{one}' for one in sorted(commits)], 3)}"
            raise UsageError(message, hint=hint) from None
        return _require_inside(store, f"{_SNAPSHOTS}/{commits[0]}") if commits else ""
    commit = safe_name(said, named_by=_MAIN)
    if commit not in commits:
        raise CorruptError(
            f"{_MAIN} of {store.describe('')} names the snapshot {commit}, which is not there",
            hint="fetch it again: `hf download` completes it",
            kind="pointer-dangling",
            file=_MAIN,
        )
    return _require_inside(store, f"{_SNAPSHOTS}/{commit}")


def _require_inside(store: Store, path: str) -> str:
    """Return a path if no link leads to it; its content is not read otherwise, nor quoted."""
    here, local = store.local_path(""), store.local_path(path)
    if here is None or local is None:
        return path
    if os.path.realpath(local) != os.path.join(os.path.realpath(here), path):
        raise UnsafeError(
            f"{local} is a link, or lies behind one: a hub's cache has none there",
            hint="name the folder that it leads to, if it is yours",
            kind="special-file",
            file=path,
        )
    return path
