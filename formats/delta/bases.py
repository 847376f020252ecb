"""Find the bases of a root's checkpoints, so that gc keeps what deltas need."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from ftckpt.discovery.roots import Candidate, Child, Root, concurrently
from ftckpt.errors import CorruptError, DeniedError, NotFoundError, UnsafeError, UnsupportedError
from ftckpt.manifest.locate import read
from ftckpt.own_files import MANIFEST, SUFFIX
from ftckpt.storage.store import EntryKind, Store

from .names import FORMAT

_READING = threading.Lock()


def bases(root: Root, child: Child) -> Sequence[str]:
    """Return the places of all that a checkpoint of a root may depend on.

    Only the first bytes of its index are read. Where nothing stands where the base was, that place
    counts all the same, because it may lie in the trash; and so does every checkpoint of its step
    in the root, because a reader would look for it among them. The same holds where the place is by
    now the delta's own, or that of another step. It may have been renamed: then it is
    the one with its manifest, one whose manifest may not be read, or one whose name says no step.
    What lies in the store is named by
    its path there, what lies elsewhere by its absolute path or URL. What lies inside a checkpoint
    (one model of several) is named together with all around it.

    Raises:
        CorruptError: the index is damaged (`bad-delta`).
        UnsupportedError: it is of another version: what it is built on cannot be known.
        UnavailableError, DeniedError: it could not be read.
    """
    return tuple(dict.fromkeys(_of(root, child))) if child.part.format.name == FORMAT else ()


def _of(root: Root, child: Child) -> Iterator[str]:
    from ftckpt.delta.index.head import read_base, resolved

    from .chain import step_of

    base = read_base(root.store, child.part.entry.path)
    if base is None:
        return
    place = _place(root.store, child.part.entry.path)
    recorded = resolved(base.path, place)
    path = _inside(root.store, recorded)
    step = step_of(base)
    if path is None:
        yield recorded
    else:
        yield from _with_all_around(path)
        there = next((c for c in root.candidates if c.entry.path == path), None)
        # Directories are renamed: another step, or the delta itself, may have the place by now.
        other = there is not None and (there == child.candidate or there.step not in (None, step))
        if not other and _stands(root.store, path):
            return
    digests = _digests(root) if path is not None and base.manifest else {}
    for candidate in root.candidates:
        if candidate == child.candidate:
            continue
        same = candidate.step == step is not None
        # In the same store it may have been renamed; the base may also be one that is denied.
        renamed = candidate.step is None or digests.get(candidate.path) in ("", base.manifest)
        if same or (path is not None and renamed):
            yield candidate.entry.path


def _digests(root: Root) -> Mapping[str, str]:
    """Return the digests of the manifests of a root's checkpoints; "" where one may not be read.

    They are read once, however many deltas have lost their base.
    """
    from .chain import manifest_digest

    def of(candidate: Candidate) -> str | None:
        entry = candidate.entry
        folder = entry.kind is EntryKind.DIRECTORY
        beside = f"{entry.path}/{MANIFEST}" if folder else entry.path + SUFFIX
        try:
            return manifest_digest(read(root.store, beside))
        except DeniedError:
            return ""
        except (NotFoundError, CorruptError, UnsafeError, UnsupportedError):
            return None

    with _READING:  # deltas are looked at side by side
        known = root.memo.get(__name__)
        if known is None:
            named = [c for c in root.candidates if c.step is not None]
            found = zip(named, concurrently(root.store, of, named), strict=True)
            known = root.memo[__name__] = {c.path: one for c, one in found if one is not None}
    return cast("Mapping[str, str]", known)


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
