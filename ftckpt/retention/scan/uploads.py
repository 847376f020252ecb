"""Unfinished uploads: they cost money, and no listing of objects shows them.

An upload does not name its owner. It is ours if a killed transfer of ftckpt left a marker that
names this very key. Purge aborts those once they are old; others may still be continued and are
only reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ftckpt.discovery.roots import Root
from ftckpt.errors import (
    CorruptError,
    DeniedError,
    FtckptError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.findings import counted
from ftckpt.own_files import TRANSFER
from ftckpt.retention.policy import GRACE
from ftckpt.storage.store import Store, Unfinished


def old_uploads(root: Root, now: float) -> list[Unfinished]:
    """Return the unfinished uploads in a root that are at least a day old, sorted.

    Raises:
        UnsupportedError: the service cannot list them.
        DeniedError, UnavailableError: they could not be listed.
    """
    return [u for u in root.store.unfinished(root.base) if now - u.started >= GRACE]


def own_uploads(store: Store, uploads: Sequence[Unfinished]) -> list[Unfinished]:
    """Return those of some uploads that a transfer of ftckpt has begun.

    Raises:
        DeniedError, UnavailableError: a marker could not be read.
    """
    return [upload for upload, _ in _owned(store, uploads)]


def dead_uploads(root: Root, now: float) -> list[Unfinished]:
    """Return ftckpt's own uploads that got no part for a day, nor their places anything.

    Parts of one transfer may take days for a file, of which the place shows nothing meanwhile.

    Raises:
        UnsupportedError: the service cannot list them.
        DeniedError, UnavailableError: they could not be listed.
    """
    newest: dict[str, float] = {}
    found = []
    for upload, place in _owned(root.store, old_uploads(root, now)):
        if place not in newest:
            times = [entry.mtime or 0.0 for entry in root.store.walk(place)]
            newest[place] = max(times, default=0.0)
        if now - newest[place] >= GRACE and not _gets_on(root.store, upload, now):
            found.append(upload)
    return found


def has_dead_uploads(root: Root, now: float) -> bool:
    """Say whether `abort_own` has something to do."""
    try:
        return bool(dead_uploads(root, now))
    except FtckptError:
        return False  # nothing depends on them


def is_sent_to(store: Store, place: str, now: float) -> bool:
    """Say whether an upload below a place was begun, or got a part, in the last day.

    Raises:
        UnsupportedError: the service cannot list them, or not their times.
        DeniedError, UnavailableError: they could not be listed.
    """
    return any(_gets_on(store, upload, now) for upload in store.unfinished(place))


def _gets_on(store: Store, upload: Unfinished, now: float) -> bool:
    if now - upload.started < GRACE:
        return True
    sent = store.last_sent(upload)
    return sent is not None and now - sent < GRACE


def _owned(store: Store, uploads: Sequence[Unfinished]) -> Iterator[tuple[Unfinished, str]]:
    """Yield those that a transfer of ftckpt has begun, each with the place of its marker."""
    markers: dict[str, frozenset[str]] = {}
    for upload in uploads:
        for place in _above(upload.path):
            if place not in markers:
                markers[place] = announced_at(store, place)
            if upload.path[len(place) + 1 :] in markers[place]:
                yield upload, place
                break


def upload_notes(root: Root, now: float) -> Iterator[str]:
    """Yield notes on a root's uploads for the person who pays for it."""
    try:
        old = old_uploads(root, now)
        own = own_uploads(root.store, old)
    except (DeniedError, UnsupportedError):
        return  # a plan does not depend on them
    if old:
        whose = (
            f"; {len(own)} of ftckpt's own, which gc purge aborts after a day without a part"
            if own
            else ""
        )
        yield (
            f"{root.url} holds {counted(len(old), 'upload')} that nobody has finished for a day, "
            f"and that {'is' if len(old) == 1 else 'are'} paid for{whose} (the first: "
            f"{root.store.describe(old[0].path)})"
        )


def abort_own(root: Root, now: float) -> Iterator[str]:
    """Abort ftckpt's own uploads that are dead; yield what was done.

    A transfer that is run again writes such a file anew, from its beginning.
    """
    try:
        own = dead_uploads(root, now)
    except FtckptError:
        return  # the next plan reports them again
    for upload, error in zip(own, root.store.abort(own), strict=True):
        url = root.store.describe(upload.path)
        yield f"an upload to {url} {'was aborted' if error is None else f'stays: {error}'}"


def _above(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


def announced_at(store: Store, place: str) -> frozenset[str]:
    """Return what the marker of a transfer in a place says that it writes there; none without one.

    Raises:
        DeniedError, UnavailableError: it could not be read.
    """
    from ftckpt.transfer.write.journal import read_announced

    path = f"{place}/{TRANSFER}"
    try:
        return read_announced(store.read(path, 0, store.stat(path).size))
    except (NotFoundError, CorruptError, UnsafeError, ValueError):
        return frozenset()
