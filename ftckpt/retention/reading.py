"""Read a root as entries: what each name is, by names and times alone.

Headers are opened only where a name does not say its step, or where a save looks abandoned:
`checking` opens what a plan keeps. A local directory is listed by its names once; on an object
store, where one listing shows everything, it is walked once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftckpt.errors import (
    NotFoundError,
    UnavailableError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.manifest import FOLDER, is_own
from ftckpt.progress import NULL, Counter
from ftckpt.roots import Candidate, Root, concurrently, join
from ftckpt.store import Entry

from . import leases, pins, tags
from .classifying import classify
from .entries import EntryClass, Lease, Pin, RootEntry
from .found import Found, Reading
from .records import own_folder

TRASH = "trash"


def read_entries(root: Root, how: Reading, *, counter: Counter = NULL) -> list[Found]:
    """Return everything that lies in one root, with what holds it there.

    Raises:
        UnavailableError, DeniedError: something could not be listed; nothing is concluded then.
        UnsafeError: the root's `.ftckpt` is a link.
    """
    evidence = _Evidence.of(root, how.now)
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


@dataclass(frozen=True, slots=True)
class _Evidence:
    """Who holds which entry of a root, each by the entry's name."""

    pointers: Mapping[str, Sequence[str]]
    pins: Mapping[str, Sequence[Pin]]
    leases: Mapping[str, Sequence[Lease]]
    tags: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, root: Root, now: float) -> _Evidence:
        pinned: dict[str, list[Pin]] = defaultdict(list)
        leased: dict[str, list[Lease]] = defaultdict(list)
        for pin in pins.pins(root):
            pinned[pin.entry].append(pin)
        for lease in leases.live(root, now):
            leased[lease.entry].append(lease)
        return cls(_pointed(root), pinned, leased, tags.tags(root))

    def added_to(self, found: Found) -> Found:
        base = found.root.base
        name = found.place.path.removeprefix(f"{base}/" if base else "")
        return found.now(
            pointers=tuple(self.pointers.get(name, ())),
            pins=tuple(self.pins.get(name, ())),
            leases=tuple(self.leases.get(name, ())),
            tags=tuple(self.tags.get(name, ())),
        )


def _pointed(root: Root) -> dict[str, list[str]]:
    """Return the pointers that mean each candidate; a step means every candidate of that step.

    Raises:
        UnavailableError: one names a checkpoint that is there and was not listed.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for pointer in root.pointers:
        for candidate in root.candidates:
            same = candidate.step is not None and candidate.step == pointer.step
            if candidate.path == pointer.target or same:
                found[candidate.path].append(pointer.name)
        if pointer.target is None:
            _require_absent(root, pointer.says.rstrip("/").rpartition("/")[2])
    return found


def _require_absent(root: Root, name: str) -> None:
    if not name or name in root.foreign:
        return
    try:
        root.store.stat(join(root.base, name))
    except (NotFoundError, UnsafeError, UnsupportedError):  # the last two: no name of a file
        return
    raise UnavailableError(
        f"the listing of {root.url} does not show {name}, which is there",
        hint="the listing is behind: try again",
        file=name,
    )


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
