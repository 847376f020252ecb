"""Read a root as entries: what each name is, by names and times alone.

Headers are opened only where a name does not say its step, or where a save looks abandoned:
`checking` opens what a plan keeps. A local directory is listed by its names once; on an object
store, where one listing shows everything, it is walked once.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ftckpt.checkpoint import CommitState
from ftckpt.errors import (
    CorruptError,
    IncompleteError,
    NotFoundError,
    UnavailableError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.listing import listing_of_directory, listing_of_file
from ftckpt.manifest import FOLDER, NAME, SUFFIX, TRANSFER, is_own
from ftckpt.opening import open_child, recognise_at
from ftckpt.progress import NULL, Counter
from ftckpt.registry import Format, Listing, recognise
from ftckpt.roots import Candidate, Child, Part, Root, concurrently, join
from ftckpt.store import Entry, EntryKind
from ftckpt.stores.listed import ListedStore

from . import leases, pins, tags
from .contents import list_entry, sum_up
from .entries import Contents, EntryClass, Lease, Pin, RootEntry
from .metrics import metric_of
from .policy import GRACE, Metric
from .records import own_folder
from .times import time_of_files, time_of_listing

TRASH = "trash"

# Names that give a checkpoint a part to play; a trainer loads them by these names.
_NAMED = re.compile(r"(?:last|latest|best|final|release|initial)(?:[-_.].*)?")

Bases = Callable[[Root, Child], Sequence[str]]


def no_bases(root: Root, child: Child) -> Sequence[str]:
    """Say that a checkpoint is whole by itself."""
    return ()


@dataclass(frozen=True, slots=True)
class Found:
    """An entry, and where it was found.

    Attributes:
        entry: what is known of it.
        root: of its run.
        place: its directory or file.
        child: as the formats recognise it; None where none does.
        sealed: whether a manifest stands with it, or may, in one of several parts.
    """

    entry: RootEntry
    root: Root
    place: Entry
    child: Child | None = None
    sealed: bool = False

    def now(self, **known: object) -> Found:
        """Return it with more known of the entry."""
        return replace(self, entry=replace(self.entry, **known))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Reading:
    """How a root is read.

    Attributes:
        formats: in asking order.
        now: seconds since the epoch.
        metric: to look up; None for none.
        bases: returns the paths, in the store, of what a checkpoint is a delta upon.
    """

    formats: Sequence[Format]
    now: float
    metric: Metric | None = None
    bases: Bases = no_bases


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
            found = _Candidate(root, candidate, how).classify()
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


class _Candidate:
    """One candidate, being told what it is.

    Args:
        root: of its run.
        candidate: its name.
        how: see `Reading`.
    """

    def __init__(self, root: Root, candidate: Candidate, how: Reading) -> None:
        self.root = root
        self.candidate = candidate
        self.place = candidate.entry
        self.how = how
        self.files: list[Entry] | None = None
        self.contents: Contents | None = None

    def classify(self) -> Found:
        """Return the entry.

        Raises:
            NotFoundError: it is gone.
            UnavailableError, DeniedError: it cannot be listed.
        """
        if self.place.link is not None:
            return self._found(EntryClass.FOREIGN, f"a link to {self.place.link}: never followed")
        local = self.root.store.traits.local and self.place.kind is EntryKind.DIRECTORY
        if not local or self.candidate.staging:
            self._list()
        if self.candidate.staging:
            return self._unfinished("its name says that it is not finished", None)
        listing = self._listing()
        child = self._recognise(listing)
        if child is None:
            return self._found(EntryClass.FOREIGN, "no format knows it")
        odd = next((p for p in child.parts if not p.recognition.supported), None)
        if odd is not None:
            return self._found(EntryClass.FOREIGN, odd.recognition.reason, child)
        torn = [p for p in child.parts if p.recognition.commit is CommitState.UNCOMMITTED]
        if torn:
            return self._torn(child, torn[0].recognition.reason, listing)
        if NAME not in listing.files and _in_transfer(listing):
            return self._unfinished("a transfer to it is under way, or was killed", child)
        return self._committed(child, listing)

    def _committed(self, child: Child, listing: Listing) -> Found:
        """A finished save, as its names say; its headers only for a step that they do not say."""
        step, named = self.candidate.step, _NAMED.fullmatch(self.candidate.path) is not None
        why = child.parts[0].recognition.reason
        if step is None and not named:
            try:
                step = open_child(self.root, child)[0].step
            except (CorruptError, UnsafeError) as error:
                return self._found(EntryClass.CORRUPT, error.message, child)
            except IncompleteError as error:
                return self._unfinished(error.message, child)
            except UnsupportedError as error:
                return self._found(EntryClass.FOREIGN, error.message, child)
        found = self._found(EntryClass.COMMITTED, why, child)
        time = time_of_listing(listing) if self.files is None else self._time()
        metric = self.how.metric
        value = metric and metric_of(self.root, self.place, metric.name, step)
        bases = tuple(self.how.bases(self.root, child))
        sealed = self.candidate.path + SUFFIX in self.root.foreign or NAME in listing.files
        found = replace(found, sealed=sealed or len(child.parts) > 1)
        return found.now(step=step, time=time, named=named, metric=value, bases=bases)

    def _torn(self, child: Child, reason: str, listing: Listing) -> Found:
        """A save without its commit marker: not finished, unless it is known to have been."""
        if NAME in listing.files:
            why = f"it was sealed, and now it {reason}"
            return self._found(EntryClass.CORRUPT, why, child)
        try:
            # That a listing does not show a marker is no proof: opening asks for it.
            open_child(self.root, child)
        except (CorruptError, UnsafeError) as error:
            return self._found(EntryClass.CORRUPT, error.message, child)
        except (IncompleteError, UnsupportedError):
            return self._unfinished(f"it {reason}", child)
        return self._committed(child, listing)

    def _unfinished(self, why: str, child: Child | None) -> Found:
        self._list()
        time = self.contents.newest if self.contents is not None else None
        silent = time is not None and self.how.now - time >= GRACE
        kind = EntryClass.ABANDONED if silent else EntryClass.STAGING
        return self._found(kind, why, child).now(time=time)

    def _found(self, kind: EntryClass, why: str, child: Child | None = None) -> Found:
        entry = RootEntry(
            name=self.place.path,
            group=self.root.base,
            entry_class=kind,
            step=self.candidate.step,
            time=self.place.mtime,
            format=child.parts[0].format.name if child else "",
            why=why,
            contents=self.contents,
        )
        return Found(entry, self.root, self.place, child)

    def _list(self) -> None:
        if self.files is None:
            self.files = list_entry(self.root.store, self.place)
            self.contents = sum_up(self.files)

    def _time(self) -> float | None:
        assert self.files is not None
        if self.place.kind is EntryKind.FILE:
            return self.files[0].mtime
        return time_of_files(self.files, self.place.path)

    def _listing(self) -> Listing:
        if self.place.kind is EntryKind.FILE:
            return listing_of_file(self.root.store, self.place)
        return listing_of_directory(self._seen().store, self.place.path)

    def _seen(self) -> Root:
        """The root as the listing that was made shows it."""
        if self.files is None or self.place.kind is EntryKind.FILE:
            return self.root
        store = ListedStore(self.root.store, self.files)

        def ask(entry: Entry) -> Part | None:
            return recognise_at(store, entry, self.how.formats)

        return replace(self.root, store=store, ask=ask)

    def _recognise(self, listing: Listing) -> Child | None:
        known = recognise(self.how.formats, listing)
        if known is not None:
            return Child(self.candidate, (Part(self.place, *known),))
        return self._seen().recognise(self.candidate)  # perhaps one checkpoint a model


def _in_transfer(listing: Listing) -> bool:
    own, _, name = TRANSFER.partition("/")
    return own in listing.directories and name in listing.inside(own).files


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
