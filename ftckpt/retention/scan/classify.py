"""Classify one name of a root, as far as names and times allow.

Another run inside an entry: gc drops whole directories, and would drop that too.

`OUT=$CKPT/sft` is a common line in scripts. What lies inside has pins, rules and a log of its own,
which the plan of this root does not read. Parts of one checkpoint have names of steps as well
(DeepSpeed's tags, roots of Megatron below a model's name), and an entry that stays for nothing
fills the disk: one step alone counts only where a checkpoint lies in a checkpoint that does not
know its files.

Find the file that commits a checkpoint; without it the format ignores the rest.

Tries the format on a listing that lacks one name, so no second list of names is needed. A marker is
a small file, and among those that were written last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.counts import counts_in
from ftckpt.discovery.dropped import Tomb
from ftckpt.discovery.listing import listing_of_directory, listing_of_file, open_part, recognise_at
from ftckpt.discovery.lone_manifests import alone, alone_of
from ftckpt.discovery.pointers import FILES
from ftckpt.discovery.recognise import Listing, UnopenedPart, recognise
from ftckpt.discovery.roots import Candidate, Child, Root
from ftckpt.discovery.series import roles_in
from ftckpt.discovery.small_files import tell_names
from ftckpt.discovery.step_names import finished_name, step_in_name, worded_step
from ftckpt.errors import (
    CorruptError,
    DeniedError,
    IncompleteError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.manifest.locate import thinned_from
from ftckpt.own_files import FOLDER, MANIFEST, SUFFIX, TRANSFER, is_leftover, is_own, weights_of
from ftckpt.retention.policy import GRACE
from ftckpt.retention.policy.metrics import metric_of, time_of_files, time_of_listing
from ftckpt.storage.readonly import ListedStore
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, EntryKind, Store

from .entries import SHARED, EntryClass, EntryContents, RootEntry, ScanDepth
from .entry import ScannedEntry, ScanOptions, list_entry, sum_up, with_needs
from .leftovers import announced_at, is_sent_to

# What ftckpt keeps in a root alone, never in a checkpoint.
_OF_ROOTS = frozenset({"root.json", "pins", "tags", "leases"})
# Converters that know no step write `step_5/policy/weights/iter_0000000`.
_OF_PARTS = (0, 1)
# A tag of DeepSpeed in a checkpoint of a trainer: the two count differently.
_TAG = "global_step"


class Suspects(NamedTuple):
    """What lies inside an entry and has the name of a step.

    Attributes:
        root: the path of what has pins, tags or the like of its own; "" without one.
        several: paths of steps beside each other, but that of the entry's own step.
        alone: paths of other steps that have none beside them.
    """

    root: str
    several: Sequence[str] = ()
    alone: Sequence[str] = ()


def with_run(found: ScannedEntry, files: Iterable[Entry]) -> ScannedEntry:
    """Return an entry that gc may drop with what lies in it of another run.

    Raises:
        UnavailableError, DeniedError: it could not be read.
    """
    contents = found.entry.contents
    if contents is None or found.entry.entry_class in (EntryClass.FOREIGN, EntryClass.TRASH):
        return found
    run = run_inside(found, files)
    return found.now(contents=replace(contents, run=run)) if run else found


def run_inside(found: ScannedEntry, files: Iterable[Entry]) -> str:
    """Return the path of a checkpoint or root of another run inside an entry; "" if none shows.

    Args:
        found: the entry.
        files: all of its files.

    Raises:
        UnavailableError, DeniedError: it could not be read.
    """
    if found.place.kind is not EntryKind.DIRECTORY:
        return ""
    suspects = suspects_in((file.path for file in files), found.place.path)
    if suspects.root:
        return suspects.root
    several = list(_checkpoints(found, suspects.several))
    alone = list(_checkpoints(found, suspects.alone)) if found.child is not None else []
    if not several and not alone:
        return ""
    members = _members(found)
    if members is None:  # nothing tells whose they are
        alone = []
    for path in (*several, *alone):
        if not any(member.startswith(path + "/") for member in members or ()):
            return path
    return ""


def suspects_in(paths: Iterable[str], base: str) -> Suspects:
    """Return what the names of an entry's files show.

    Args:
        paths: of the files.
        base: of the entry.
    """
    own = step_in_name(base.rpartition("/")[2])
    below: dict[str, dict[int, str]] = defaultdict(dict)
    pointed = False
    for path in paths:
        folders = path[len(base) + 1 :].split("/")
        name = folders.pop()
        pointed |= not folders and name in FILES
        for place, folder in enumerate(folders):
            if folder == FOLDER:
                if (*folders[place + 1 :], name)[0] in _OF_ROOTS:
                    return Suspects("/".join([base, *folders[:place]]))
                break
            step = worded_step(folder)
            if step is not None:
                above = "/".join(folders[:place])
                below[above].setdefault(step, "/".join([base, *folders[: place + 1]]))
    several: list[str] = []
    alone: list[str] = []
    for above, steps in below.items():
        others = [path for step, path in sorted(steps.items()) if step != own]
        if len(steps) > 1:
            several += others
            continue
        part = own is None or next(iter(steps)) in _OF_PARTS
        tag = not above and (pointed or any(p.startswith(f"{base}/{_TAG}") for p in others))
        if not part and not tag:
            alone += others
    return Suspects("", several, alone)


def _checkpoints(found: ScannedEntry, paths: Iterable[str]) -> Iterator[str]:
    """Yield those of some directories that a format knows; `samples/step_100` is none."""
    for path in paths:
        with suppress(NotFoundError):
            if found.root.ask(Entry(path, 0, None, EntryKind.DIRECTORY)) is not None:
                yield path


def _members(found: ScannedEntry) -> list[str] | None:
    """Return the paths of the files of an entry's checkpoint; None if nothing shows them."""
    if found.child is None:
        return None
    try:
        members = open_part(found.root.store, found.child.part).members()
        return [f"{found.place.path}/{name}" for name in members]
    except (CorruptError, IncompleteError, NotFoundError, UnsafeError, UnsupportedError):
        return None


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
            from ftckpt.transfer.staging.object import UPLOAD  # most runs need none of it

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
            from ftckpt.storage.readonly import ListedStore

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


# The metadata of a checkpoint of a hundred thousand tensors.
LARGEST = 64 << 20
# Number of last written files to try.
_TRIES = 32
# If a checkpoint lies beside a trainer's other files, its marker is one level deeper.
_DEPTH = 2


def marker_of(store: Store, part: UnopenedPart, files: Sequence[Entry]) -> Entry | None:
    """Return the file that commits a checkpoint; None if no single small file does.

    `files` holds at least all files of the checkpoint.

    Raises:
        UnavailableError, DeniedError: a header could not be read.
    """
    if (
        part.entry.kind is not EntryKind.DIRECTORY
        or part.recognition.commit is not CommitState.COMMITTED
    ):
        return None
    inside = [file for file in files if file.path.startswith(part.entry.path + "/")]
    return next((f for f in _likely(part, inside) if _commits(store, part, f, inside)), None)


def _likely(part: UnopenedPart, inside: Sequence[Entry]) -> list[Entry]:
    skip = len(part.entry.path) + 1
    near = [f for f in inside if f.size <= LARGEST and f.path[skip:].count("/") < _DEPTH]
    return sorted(near, key=lambda f: (-(f.mtime or 0.0), f.size, f.path))[:_TRIES]


def _commits(store: Store, part: UnopenedPart, file: Entry, inside: Sequence[Entry]) -> bool:
    rest = ListedStore(store, [other for other in inside if other.path != file.path])
    try:
        left = recognise_at(rest, part.entry, [part.format])
    except NotFoundError:  # nothing else lies there
        return True
    return left is None or left.recognition.commit is CommitState.UNCOMMITTED
