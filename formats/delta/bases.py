"""Find the bases of a root's checkpoints, so that gc keeps what deltas need."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ftckpt.delta import BaseName
from ftckpt.discovery.recognise import UnopenedPart
from ftckpt.discovery.roots import Candidate, Child, Root
from ftckpt.errors import CorruptError, NotFoundError, UnsafeError, UnsupportedError
from ftckpt.manifest.locate import read
from ftckpt.own_files import MANIFEST, SUFFIX
from ftckpt.storage.store import EntryKind, Store

from .names import FORMAT


def bases(root: Root, child: Child) -> Sequence[str]:
    """Return the places of all that a checkpoint of a root may depend on.

    Only the first bytes of its index are read. Where nothing stands where the base was, that place
    counts all the same, because it may lie in the trash; and so does every checkpoint of its step
    in the root, because a reader would look for it among them. It may have been renamed: then it is
    the one with its manifest, or one whose name says no step. What lies in the store is named by
    its path there, what lies elsewhere by its absolute path or URL. What lies inside a checkpoint
    (one model of several) is named together with all around it.

    Raises:
        CorruptError: the index is damaged (`bad-delta`).
        UnsupportedError: it is of another version: what it is built on cannot be known.
        UnavailableError, DeniedError: it could not be read.
    """
    parts = (part for part in child.parts if part.format.name == FORMAT)
    return tuple(dict.fromkeys(path for part in parts for path in _of_part(root, child, part)))


def _of_part(root: Root, child: Child, part: UnopenedPart) -> Iterator[str]:
    from ftckpt.delta.index.base_path import resolved
    from ftckpt.delta.index.head import read_base

    from .chain import step_of

    base = read_base(root.store, part.entry.path)
    if base is None:
        return
    place = _place(root.store, part.entry.path)
    recorded = resolved(base.path, place)
    path = _inside(root.store, recorded)
    if path is None:
        yield recorded
    else:
        yield from _with_all_around(path)
        if _stands(root.store, path):
            return
    step = step_of(base)
    for candidate in root.candidates:
        if candidate == child.candidate:
            continue
        same = candidate.step == step is not None
        if same or (path is not None and _may_be_renamed(root.store, candidate, base)):
            yield candidate.entry.path


def _may_be_renamed(store: Store, candidate: Candidate, base: BaseName) -> bool:
    """Whether a checkpoint may be a base that stood under another name in the same store."""
    from .chain import manifest_digest

    if candidate.step is None:
        return True
    if not base.manifest:
        return False
    entry = candidate.entry
    folder = entry.kind is EntryKind.DIRECTORY
    try:
        manifest = read(store, f"{entry.path}/{MANIFEST}" if folder else entry.path + SUFFIX)
    except (NotFoundError, CorruptError, UnsafeError, UnsupportedError):
        return False
    return manifest_digest(manifest) == base.manifest


def _with_all_around(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition("/")[0]


def _place(store: Store, path: str) -> str:
    local = store.local_path(path)
    return store.describe(path) if local is None else os.path.realpath(local)


def _inside(store: Store, place: str) -> str | None:
    """Return the path in the store of an absolute path or URL; None where it lies elsewhere."""
    root = _place(store, "").rstrip("/") + "/"
    if store.traits.local:
        place = os.path.realpath(place)
    return place.removeprefix(root).rstrip("/") if place.startswith(root) else None


def _stands(store: Store, path: str) -> bool:
    try:
        store.stat(path)
    except NotFoundError:
        return False
    return True
