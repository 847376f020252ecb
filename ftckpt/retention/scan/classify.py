"""Classify one name of a root, as far as names and times allow."""

from __future__ import annotations

from dataclasses import replace

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.counts import counts_in
from ftckpt.discovery.dropped import Tomb
from ftckpt.discovery.listing import listing_of_directory, listing_of_file
from ftckpt.discovery.lone_manifests import alone, alone_of
from ftckpt.discovery.open_part import open_part
from ftckpt.discovery.recognise import Listing, UnopenedPart, recognise
from ftckpt.discovery.roots import Candidate, Child, Root
from ftckpt.discovery.series import roles_in
from ftckpt.discovery.small_files import tell_names
from ftckpt.discovery.step_names import finished_name
from ftckpt.errors import (
    CorruptError,
    DeniedError,
    IncompleteError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.manifest.thinned import thinned_from
from ftckpt.own_files import MANIFEST, SUFFIX, TRANSFER, is_leftover, is_own, weights_of
from ftckpt.retention.policy import GRACE
from ftckpt.retention.policy.metrics import metric_of
from ftckpt.retention.policy.times import time_of_files, time_of_listing
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, EntryKind

from .contents import list_entry, sum_up
from .entries import SHARED, EntryClass, EntryContents, RootEntry, ScanDepth
from .entry import ScannedEntry, ScanOptions
from .inside import with_run
from .links import with_needs
from .uploads import announced_at, is_sent_to

# The weights of a checkpoint that stands whole wait for it to be thinned, or for gc to drop them.
PENDING = "it holds the weights of "
# What lacks something may be a save of another form, or have lost it: no sign of a dead writer.
GUESS = "nothing shows that its writer died"

_TRANSFER = "a transfer to it is under way, or was killed"


def classify(root: Root, candidate: Candidate, how: ScanOptions) -> ScannedEntry:
    """Classify a candidate of a root.

    Raises:
        NotFoundError: it is gone.
        UnavailableError, DeniedError: it cannot be listed or read.
    """
    one = _Candidate(root, candidate, how)
    found = one.classify()
    if one.files is not None:
        found = with_run(found, one.files)
    return with_needs(found, one.files, whole=how.needs)


def judged_by(found: ScannedEntry, how: ScanOptions) -> ScannedEntry:
    """Return an entry with the facts that a policy needs of a committed one: metric and bases.

    Raises:
        UnsupportedError: a delta of another version: its bases cannot be known.
        UnavailableError, DeniedError: it cannot be read.
    """
    if found.entry.entry_class is not EntryClass.COMMITTED or found.child is None:
        return found
    if weights_of(found.place.path):
        return _of_weights(found, how)
    metric = how.metric
    value = metric and metric_of(found.root, found.place, metric.name, found.entry.step)
    try:
        return found.now(metric=value, bases=_bases(found.root, found.child, how))
    except CorruptError as error:  # it cannot be read without its bases
        return with_needs(found.now(entry_class=EntryClass.CORRUPT, why=error.message), None)


def _of_weights(found: ScannedEntry, how: ScanOptions) -> ScannedEntry:
    """Return an entry that gc has thinned, with what its record says of the one that was saved."""
    found = found.now(thinned=weights_of(found.place.path))
    known = thinned_from(Source.directory(found.root.store, found.place.path))
    if known is None:
        return found
    metric = how.metric and known.metrics.get(how.metric.name)
    return found.now(time=known.saved, metric=metric)


def _bases(root: Root, child: Child, how: ScanOptions) -> tuple[str, ...]:
    """Return its bases; reads twice, because a bit may flip in transit."""
    try:
        return tuple(how.bases(root, child))
    except CorruptError:
        return tuple(how.bases(root, child))


class _Candidate:
    """One candidate while it is classified."""

    def __init__(self, root: Root, candidate: Candidate, how: ScanOptions) -> None:
        self.root = root
        self.candidate = candidate
        self.place = candidate.entry
        self.how = how
        self.files: list[Entry] | None = None
        self.contents: EntryContents | None = None
        self.looked = ScanDepth.NAMES

    def classify(self) -> ScannedEntry:
        """Return the entry (see `classify`)."""
        if self.place.link is not None:
            return self._found(EntryClass.FOREIGN, f"a link to {self.place.link}: never followed")
        local = self.root.store.traits.local and self.place.kind is EntryKind.DIRECTORY
        if not local or self.candidate.staging:
            self._list()
        tomb = self.root.tombs.get(self.candidate.path)
        if tomb is not None and self.files is not None and tomb.holds(self.files):
            return self._dropped(tomb)
        if self.candidate.staging:
            # `tmp-notes` is not a trainer's unfinished save of a step.
            marked = self.candidate.step is not None
            by = "name" if finished_name(self.candidate.path) != self.candidate.path else "marker"
            return self._unfinished(f"its {by} says that it is not finished", None, marked=marked)
        whole = self.root.whole(self.candidate)
        listing = self._listing()
        child = self._recognise(listing, whole)
        if child is None:
            if self._is_transfer_alone(listing):
                return self._unfinished(_TRANSFER, None)
            return self._of_no_format()
        if whole is not None:
            return self._unfinished(f"{PENDING}{whole.path}, which stands", child)
        shown = child.part.recognition
        if not shown.supported:
            return self._found(EntryClass.FOREIGN, shown.reason, child)
        if shown.shares:
            return self._found(EntryClass.FOREIGN, SHARED, child)
        if shown.commit is CommitState.UNCOMMITTED:
            return self._torn(child, shown.reason, listing)
        if MANIFEST not in listing.files and _in_transfer(listing):
            return self._unfinished(_TRANSFER, child)
        return self._committed(child, listing)

    def _is_transfer_alone(self, listing: Listing) -> bool:
        """Say whether all that lies there is of a transfer that has shown too little so far."""
        if self.files is None or MANIFEST in listing.files or not _in_transfer(listing):
            return False
        theirs = announced_at(self.root.store, self.place.path)
        start = len(self.place.path) + 1
        inside = [entry.path[start:] for entry in self.files]
        return all(is_own(name) or name in theirs for name in inside)

    def _of_no_format(self) -> ScannedEntry:
        """Classify what no format knows; on an object store a killed seal leaves a manifest."""
        lone = ""
        if self.place.kind is EntryKind.DIRECTORY:
            if self.files is None:
                lone = alone(self.root.store, self.place.path)
            else:
                lone = alone_of(self.root.store, self.files)
        if lone and not self.root.store.traits.local:
            return self._unfinished(lone, None)
        return self._found(EntryClass.FOREIGN, lone or "no format knows it")

    def _committed(self, child: Child, listing: Listing) -> ScannedEntry:
        """Classify a finished save by its names; open headers for a missing step alone.

        The names of parts do not show whether they fit together, so these are opened too.
        """
        step, named = self.candidate.step, bool(roles_in(self.candidate.path))
        counts: dict[str, int] = {}
        why = child.part.recognition.reason
        if step is None or child.part.recognition.by_names:
            self.looked = ScanDepth.HEADERS
            try:
                opened = open_part(self.root.store, child.part)
                step = opened.step if step is None else step
                counts = counts_in(opened) if step is None else {}
            except CorruptError as error:
                return self._found(EntryClass.CORRUPT, error.message, child)
            except UnsafeError as error:
                return self._found(EntryClass.UNSAFE, error.message, child)
            except IncompleteError as error:
                return self._unfinished(error.message, child, marked=False)
            except UnsupportedError as error:
                return self._found(EntryClass.FOREIGN, error.message, child)
        found = self._found(EntryClass.COMMITTED, why, child)
        time = time_of_listing(listing) if self.files is None else self._time()
        sealed = self.candidate.path + SUFFIX in self.root.foreign or MANIFEST in listing.files
        seen = len(listing.at_hand.files)
        left = tuple(sorted(filter(is_leftover, listing.at_hand.files)))
        found = replace(found, sealed=sealed, names=seen, left=left)
        found = found.now(counts=tuple(counts.items()))
        return judged_by(found.now(step=step, time=time, named=named), self.how)

    def _torn(self, child: Child, reason: str, listing: Listing) -> ScannedEntry:
        """Classify a save without its commit marker: unfinished, unless known to be finished."""
        if MANIFEST in listing.files:
            why = f"it was sealed, and now it {reason}"
            return self._found(EntryClass.CORRUPT, why, child)
        try:
            # A listing without the marker is not proof: opening requests it by name.
            self.looked = ScanDepth.HEADERS
            open_part(self.root.store, child.part)
        except CorruptError as error:
            return self._found(EntryClass.CORRUPT, error.message, child)
        except UnsafeError as error:
            return self._found(EntryClass.UNSAFE, error.message, child)
        except (IncompleteError, UnsupportedError):
            return self._unfinished(f"it {reason}", child)
        return self._committed(child, listing).now(commit=CommitState.COMMITTED)

    def _unfinished(self, why: str, child: Child | None, *, marked: bool = True) -> ScannedEntry:
        """Classify an unfinished save; `marked` says whether a mark of its writer says so."""
        self._list()
        time = self.contents.newest if self.contents is not None else None
        silent = time is not None and self.how.now - time >= GRACE and not self._is_sent_to()
        if silent and not marked:
            why = f"{why}; {GUESS}"
        kind = EntryClass.ABANDONED if silent and marked else EntryClass.STAGING
        return self._found(kind, why, child).now(time=time)

    def _is_sent_to(self) -> bool:
        """Say whether parts of a transfer's files arrive, which no listing of files shows.

        Where a store does not say it, a file that is being sent in parts may get on.
        """
        own = f"{self.place.path}/{TRANSFER}"
        paths = {entry.path for entry in self.files or ()}
        if own not in paths:
            return False
        try:
            return is_sent_to(self.root.store, self.place.path, self.how.now)
        except (DeniedError, UnsupportedError):
            from ftckpt.transfer.staging.joint import UPLOAD  # most runs need none of it

            start = own.removesuffix(".json") + "/"
            return any(p.startswith(start) and p.endswith(UPLOAD) for p in paths)

    def _found(self, kind: EntryClass, why: str, child: Child | None = None) -> ScannedEntry:
        entry = RootEntry(
            name=self.place.path,
            group=self.root.base,
            entry_class=kind,
            step=self.candidate.step,
            time=self.place.mtime,
            format=child.part.format.name if child else "",
            why=why,
            commit=child.part.recognition.commit if child else None,
            looked=self.looked,
            contents=self.contents,
        )
        return ScannedEntry(entry, self.root, self.place, child)

    def _dropped(self, tomb: Tomb) -> ScannedEntry:
        """Classify an entry that was dropped in place: it has the name of its tombstone."""
        found = self._found(EntryClass.TRASH, "dropped before").now(name=tomb.path)
        return replace(found, place=Entry(tomb.path, 0, tomb.written))

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
        store = self.root.store
        if self.files is not None:
            from ftckpt.storage.listed import ListedStore

            store = ListedStore(store, self.files)
            tell_names(self.root, self.candidate, store)
        return listing_of_directory(store, self.place.path)

    def _recognise(self, listing: Listing, whole: Candidate | None) -> Child | None:
        """Return what it is, and tell the root, which is asked for those beside it."""
        known = recognise(self.how.formats, listing)
        alone = UnopenedPart(self.place, *known) if known is not None else None
        part = alone or self.root.as_sibling(self.candidate, listing)
        child = None if part is None else Child(self.candidate, part)
        self.root.tell(self.candidate, alone, child if whole is None else None)
        return child


def _in_transfer(listing: Listing) -> bool:
    own, _, name = TRANSFER.partition("/")
    return own in listing.directories and name in listing.inside(own).files
