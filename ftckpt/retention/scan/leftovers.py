"""What killed ftckpt runs have left in a root: report it, and remove what is old.

ftckpt writes under a name that `own_files.is_leftover` knows, and renames or deletes it a moment
later. A file that is a day old belongs to no running process. Before anything goes, the store's
own clock is asked: that of this machine may be days ahead.

Records of divided operations (`ftckpt.parts`) lie in a root's `.ftckpt`. One that is a week old
speaks for nothing any more: who finishes refuses it. A part that runs says so every few seconds. So
a plan of which nothing was written for a week is dead, and its files go. What its parts have built
is a staging place like any other: gc takes it for an abandoned save.

Unfinished uploads: they cost money, and no listing of objects shows them.

An upload does not name its owner. It is ours if a killed transfer of ftckpt left a marker that
names this very key. Purge aborts those once they are old; others may still be continued and are
only reported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

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
from ftckpt.own_files import TEMPORARY, TRANSFER, is_leftover
from ftckpt.retention.policy import DAY, GRACE
from ftckpt.retention.records import own_folder
from ftckpt.storage.store import Entry, EntryKind, Store, Unfinished

SILENT = 7 * DAY
_PLAN = r"[0-9a-f]{32}"
_FILE = r"(?:\d+-\d+(?:\.[a-z]+)?|finish-\d+|finished|now)\.json"

WHY = "a run of ftckpt that was killed has left it; gc --apply and gc purge remove it after a day"


def leftovers(root: Root, now: float) -> list[Entry]:
    """Return leftovers of at least a day in a root and in its `.ftckpt`.

    Raises:
        UnavailableError, DeniedError: it could not be listed.
        UnsafeError: the root's `.ftckpt` is a link.
    """
    found = [e for e in root.store.children(root.base) if _is_ours(e, now)]
    with suppress(NotFoundError):
        found += [e for e in root.store.children(own_folder(root)) if _is_ours(e, now)]
    return found


def remove_leftovers(root: Root, now: float) -> Iterator[str]:
    """Remove leftovers of at least a day; yield what was done."""
    try:
        found = leftovers(root, now)
        if found:
            found = leftovers(root, _earlier(root, now))
    except FtckptError:
        return  # nothing depends on them
    errors = [error for error in root.store.delete([e.path for e in found]).values() if error]
    if len(errors) < len(found):
        number = counted(len(found) - len(errors), "temporary file")
        yield f"removed {number} that killed runs of ftckpt had left in {root.url}"
    for error in errors:
        yield f"a temporary file of a killed run stays in {root.url}: {error}"


def _is_ours(entry: Entry, now: float) -> bool:
    plain = entry.kind is EntryKind.FILE and entry.link is None
    return (
        plain and is_leftover(entry.path) and entry.mtime is not None and now - entry.mtime >= GRACE
    )


def dead_plans(root: Root, now: float) -> dict[str, list[Entry]]:
    """Return the files of dead plans, by the path of the plan.

    A plan beside whose records something else lies is left alone.

    Raises:
        UnavailableError, DeniedError: it could not be listed.
        UnsafeError: the root's `.ftckpt` is a link.
    """
    found: dict[str, list[Entry]] = {}
    place = f"{own_folder(root)}/parts"
    local = root.store.local_path(place)
    if local is not None and os.path.islink(local):
        return found
    with suppress(NotFoundError):
        for plan in root.store.children(place):
            plain = plan.kind is not EntryKind.FILE and plan.link is None
            if plain and re.fullmatch(_PLAN, _name(plan)):
                with suppress(NotFoundError):
                    files = root.store.children(plan.path)
                    if all(_is_dead(one, now) for one in files):
                        found[plan.path] = files
    return found


def dead_plan_notes(root: Root, now: float) -> Iterator[str]:
    """Yield notes on dead plans for who reads a plan of gc."""
    try:
        found = dead_plans(root, now)
    except DeniedError:
        return  # a plan does not depend on them
    if found:
        yield (
            f"{root.url} holds the records of {counted(len(found), 'divided operation')} that"
            " nobody went on with for a week: gc --apply and gc purge remove them (the first:"
            f" {root.store.describe(min(found))})"
        )


def remove_dead_plans(root: Root, now: float) -> Iterator[str]:
    """Remove the files of dead plans; yield what was done."""
    try:
        found = dead_plans(root, now)
        if found:
            found = dead_plans(root, _earlier(root, now))
    except FtckptError:
        return  # nothing depends on them
    paths = [one.path for files in found.values() for one in files]
    errors = [error for error in root.store.delete(paths).values() if error]
    for path in found:
        local = root.store.local_path(path)
        if local is not None:
            with suppress(OSError):  # a part has begun anew
                os.rmdir(local)
    if found and not errors:
        number = counted(len(found), "divided operation")
        yield f"removed the records of {number} that nobody went on with in {root.url}"
    for error in errors:
        yield f"a record of a divided operation stays in {root.url}: {error}"


def _earlier(root: Root, now: float) -> float:
    """Return the time by the clock that dates the files of a root, where this machine's is ahead.

    Raises:
        FtckptError: a probe could not be written, or has no time.
    """
    import secrets  # only where something old was found

    probe = f"{own_folder(root)}/{TEMPORARY}clock-{secrets.token_hex(8)}"
    root.store.create(probe, b"")
    try:
        theirs = root.store.stat(probe).mtime
    finally:
        root.store.delete([probe])
    if theirs is None:
        raise UnsupportedError(f"{root.url} keeps no times")
    return min(now, theirs)


def _is_dead(entry: Entry, now: float) -> bool:
    ours = re.fullmatch(_FILE, _name(entry)) is not None or is_leftover(entry.path)
    plain = entry.kind is EntryKind.FILE and entry.link is None
    return ours and plain and entry.mtime is not None and now - entry.mtime >= SILENT


def _name(entry: Entry) -> str:
    return entry.path.rpartition("/")[2]


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
    from ftckpt.transfer.write.blocks import read_announced

    path = f"{place}/{TRANSFER}"
    try:
        return read_announced(store.read(path, 0, store.stat(path).size))
    except (NotFoundError, CorruptError, UnsafeError, ValueError):
        return frozenset()
