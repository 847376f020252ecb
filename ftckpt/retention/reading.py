"""Read a root as entries: what each name is, by names and times alone.

Headers are opened only where a name does not say its step, or where a save looks abandoned:
`checking` opens what a plan keeps. A local directory is listed by its names once; on an object
store, where one listing shows everything, it is walked once.
"""

from __future__ import annotations

from collections.abc import Iterator

from ftckpt.errors import NotFoundError
from ftckpt.manifest import FOLDER, is_own
from ftckpt.progress import NULL, Counter
from ftckpt.roots import Candidate, Root, concurrently, join
from ftckpt.store import Entry

from .classifying import classify
from .entries import EntryClass, RootEntry
from .evidence import Evidence
from .found import Found, Reading
from .records import own_folder
from .trash import FOLDER as TRASH


def read_entries(root: Root, how: Reading, *, counter: Counter = NULL) -> list[Found]:
    """Return everything that lies in one root, with what holds it there.

    Raises:
        UnavailableError, DeniedError: something could not be listed; nothing is concluded then.
        UnsafeError: the root's `.ftckpt` is a link.
    """
    evidence = Evidence.of(root, how.now)
    counter.start("reading", len(root.candidates), "entries")

    def one(candidate: Candidate) -> Found | None:
        try:
            found = classify(root, candidate, how)
        except NotFoundError:
            found = None  # gone since it was listed: it cannot be dropped, and nothing counts on it
        counter.add(1)
        return None if found is None else evidence.added_to(found)

    listed = [f for f in concurrently(root.store, one, root.candidates) if f is not None]
    return [*listed, *_foreign(root), *_trash(root)]


def _foreign(root: Root) -> Iterator[Found]:
    for name in root.foreign:
        if not is_own(name):
            place = Entry(join(root.base, name), 0)
            entry = RootEntry(
                place.path, root.base, EntryClass.FOREIGN, why="its name is no checkpoint's"
            )
            yield Found(entry, root, place)


def _trash(root: Root) -> Iterator[Found]:
    if FOLDER not in root.foreign:
        return
    try:
        below = root.store.children(f"{own_folder(root)}/{TRASH}")
    except NotFoundError:
        return
    for place in below:
        entry = RootEntry(
            place.path, root.base, EntryClass.TRASH, time=place.mtime, why="dropped before"
        )
        yield Found(entry, root, place)
