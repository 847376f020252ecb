"""Check that a transfer's source and destination are apart, and that names work as files."""

from __future__ import annotations

import os
from dataclasses import replace

from ftckpt.checkpoint import Checkpoint
from ftckpt.discovery.step_names import step_in_name
from ftckpt.errors import RefusedError, UnsafeError, UsageError
from ftckpt.own_files import FOLDER, MANIFEST
from ftckpt.storage.remotes import split
from ftckpt.storage.source import Source, safe_name
from ftckpt.storage.store import Store

from .layout import Layout

# This many directories above a destination are searched for a manifest: a universal checkpoint of
# DeepSpeed keeps its files two below.
_LEVELS = 3


def staging_name(name: str) -> str:
    """Return the name of the directory in which a local `name` is built."""
    return f".{name}.ftckpt-staging"


def name_of(destination: str) -> str:
    """Return the last element of a path or URL."""
    return split(destination.rstrip("/"))[1]


def around(destination: str) -> str:
    """Return the directory that a path or URL lies in, with its slash; "" for the working one.

    Raises:
        UsageError: it is a bucket, and lies in none.
    """
    if "/" not in destination:
        parent, _ = split(destination)
        return "" if parent == "." else parent
    scheme, colon, path = destination.rpartition("://")
    parent, slash, name = path.rpartition("/")
    if scheme and not parent:
        raise UsageError(
            f"{destination} is a bucket and not a name in one",
            hint=f"{scheme}{colon}{name}/MANIFEST is one",
        )
    return scheme + colon + parent + slash


def absolute(store: Store) -> str:
    """Return the path of a local store, with no link, `.` or `..` in the directories above it.

    The last element is not followed: it does not exist yet, or is refused.
    """
    path = store.local_path()
    assert path is not None
    parent, name = os.path.split(path.rstrip("/"))
    if name in ("", ".", ".."):
        return os.path.realpath(path)
    return os.path.join(os.path.realpath(parent), name)


def place_of(source: Source) -> str:
    """Return the place of a checkpoint as it can be opened again, with no link in it."""
    where = source.path(next(iter(source.entries), "")) if source.single else source.base
    path = source.store.local_path(where)
    return source.store.describe(where).rstrip("/") if path is None else os.path.realpath(path)


def identity_of(source: Source) -> str:
    """Return what tells the place of a checkpoint from all others, whatever names the service."""
    if source.store.traits.local:
        return place_of(source)
    return source.store.identity(next(iter(source.entries), "") if source.single else source.base)


def require_apart(source: Source, destination: Store, what: str = "source") -> None:
    """Refuse to write inside what is read, and to read from what is built at the destination.

    Args:
        source: what is read.
        destination: where the result goes.
        what: the word for what is read.

    Raises:
        RefusedError: one of them.
    """
    for part in source.store.parts():
        _require_apart(replace(source, store=part), destination, what)


def _require_apart(source: Source, destination: Store, what: str) -> None:
    read = identity_of(source)
    if not destination.traits.local:
        written = staged = destination.identity()
    else:
        written = absolute(destination)
        parent, name = os.path.split(written)
        staged = os.path.join(parent, staging_name(name))
    if _lies_in(written, read) and written != read:
        raise RefusedError(
            f"{destination.url} lies inside the {what} {source.url}",
            hint="nothing is written into a checkpoint: choose a place beside it",
        )
    if _lies_in(read, staged):
        raise RefusedError(
            f"the {what} {source.url} lies where {destination.url} is built",
            hint="choose another destination",
        )


def require_apart_from_all(checkpoint: Checkpoint, destination: Store) -> None:
    """Refuse what `require_apart` does of a source, and of all that its tensors are decoded from.

    Raises:
        RefusedError: the destination lies in one of them, or one of them where it is built.
        FtckptError: one that it depends on is missing, or cannot be opened.
    """
    require_apart(checkpoint.source, destination)
    for base in checkpoint.decoding.bases():
        require_apart(base.source, destination, "base")
    for other in checkpoint.made_from:
        require_apart(other.source, destination, "adapter")


def require_outside(destination: Store) -> None:
    """Refuse a destination of this machine inside a sealed checkpoint: it would be a stray there.

    Only the manifest is asked: what else looks like a checkpoint by its names may be somebody's
    scratch with a file of weights in it, or a step of which other parts are still to be copied. A
    directory that holds steps too is a root, although a trainer saved its last weights there. An
    object store is not asked: it would answer a moment later, to a dry run as well.

    Raises:
        RefusedError: a sealed checkpoint lies around it.
    """
    if not destination.traits.local:
        return
    above = absolute(destination)
    for _ in range(_LEVELS):
        above = os.path.dirname(above)
        if os.path.lexists(os.path.join(above, MANIFEST)) and not _holds_steps(above):
            raise RefusedError(
                f"{destination.url} lies inside the checkpoint {above}",
                hint="nothing is written into a sealed checkpoint: choose a place beside it",
            )


def _holds_steps(path: str) -> bool:
    try:
        with os.scandir(path) as entries:
            return any(step_in_name(entry.name) is not None and entry.is_dir() for entry in entries)
    except OSError:  # whose names nobody may see; writing will say what it is
        return True


def require_names(layout: Layout) -> None:
    """Refuse names that would leave the destination, meet each other, or mean something of ours.

    Raises:
        UnsafeError: which.
    """
    seen: set[str] = set()
    folders: set[str] = set()
    for file in (*layout.files, *layout.commit):
        path = safe_name(file.path, named_by="the source")
        parts = path.split("/")
        folders.update("/".join(parts[:end]) for end in range(1, len(parts)))
        if path in seen or path == MANIFEST or parts[0] == FOLDER:
            raise UnsafeError(
                f"the result would have two files {path}"
                if path in seen
                else f"the result would have a file {path}, which is ftckpt's own",
                kind="unsafe-path",
                file=path,
            )
        seen.add(path)
    for path in sorted(seen & folders):
        raise UnsafeError(
            f"the result would have {path} as a file and as a folder",
            kind="unsafe-path",
            file=path,
        )


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
