"""Read a root as entries, by names and times alone.

Opens headers only if a name shows no step, or if a save looks abandoned; `apply.check` opens what a
plan keeps. A local directory is listed by its names once; an object store, where one listing shows
everything, is walked once.

Find what protects the entries of a root: pointers, pins, leases and tags.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ftckpt.discovery.ledger import CheckedPlace, ContentStanding, Ledger
from ftckpt.discovery.lone_manifests import alone_of
from ftckpt.discovery.roots import Candidate, Root, concurrently
from ftckpt.discovery.siblings import Looked, with_steps
from ftckpt.discovery.step_names import step_in_name
from ftckpt.errors import ExitCode, NotFoundError, UnavailableError, UnsafeError, UnsupportedError
from ftckpt.own_files import FOLDER, SUFFIX, is_leftover, is_own, weights_of
from ftckpt.progress import NULL, Counter
from ftckpt.retention.locks import leases
from ftckpt.retention.policy import GRACE
from ftckpt.retention.records import own_folder, pins, tags
from ftckpt.retention.trash import BESIDE, parse_trash_name
from ftckpt.retention.trash import FOLDER as TRASH
from ftckpt.storage.store import Entry, join, relative

from .classify import classify
from .entries import EntryClass, EntryVerdict, Lease, Pin, RootEntry
from .entry import ScannedEntry, ScanOptions, sum_up, with_needs
from .leftovers import WHY as LEFT


@dataclass(frozen=True, slots=True)
class EntryHolds:
    """What holds the entries of one root, by entry name."""

    pointers: Mapping[str, Sequence[str]]
    pins: Mapping[str, Sequence[Pin]]
    leases: Mapping[str, Sequence[Lease]]
    tags: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, root: Root, now: float, entry: str | None = None) -> EntryHolds:
        """Read what holds the entries of a root, or one entry; pointers as the root was read.

        Raises:
            UnavailableError, DeniedError: something could not be read.
            UnsafeError: the root's `.ftckpt` is a link.
        """
        pinned: dict[str, list[Pin]] = defaultdict(list)
        leased: dict[str, list[Lease]] = defaultdict(list)
        tagged: dict[str, tuple[str, ...]] = {}
        # What was asked of a checkpoint before gc thinned it holds for its weights.
        for name in (None,) if entry is None else (entry, *filter(None, [weights_of(entry)])):
            for pin in pins.pins(root, name):
                pinned[pin.entry].append(pin)
            for lease in leases.live(root, now, name):
                leased[lease.entry].append(lease)
            tagged |= {one: tuple(said) for one, said in tags.tags(root, name).items()}
        return cls(_pointed(root), pinned, leased, tagged)

    def added_to(self, found: ScannedEntry) -> ScannedEntry:
        """Return an entry with its present holds instead of its former ones."""
        base = found.root.base
        name = found.place.path.removeprefix(f"{base}/" if base else "")
        was = weights_of(name)
        tagged = dict.fromkeys((*self.tags.get(name, ()), *self.tags.get(was, ())))
        return found.now(
            pointers=tuple(self.pointers.get(name, ())),
            pins=(*self.pins.get(name, ()), *self.pins.get(was, ())),
            leases=tuple(self.leases.get(name, ())),
            tags=tuple(tagged),
        )


def _pointed(root: Root) -> dict[str, list[str]]:
    """Return the pointers to each candidate.

    A name means the candidate with that name. A step means every candidate of that step except
    those whose names mark them as unfinished.

    Raises:
        UnavailableError: a pointer's target exists, and no listing shows it.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for pointer in root.pointers:
        for candidate in root.candidates:
            if pointer.means_step:
                meant = candidate.step == pointer.step and not candidate.staging
            else:
                meant = candidate.path == pointer.target
            if meant:
                found[candidate.path].append(pointer.name)
        if pointer.target is None:
            _require_listed(root, pointer.says.rstrip("/").rpartition("/")[2])
    return found


def _require_listed(root: Root, name: str) -> None:
    """Refuse a listing that lacks an existing name, unless that is new."""
    if not name or name in root.foreign:
        return
    path = join(root.base, name)
    try:
        root.store.stat(path)
    except (NotFoundError, UnsafeError, UnsupportedError):  # the last two: not the name of a file
        return
    if any(entry.path == path for entry in root.store.children(root.base)):
        return
    raise UnavailableError(
        f"the listing of {root.url} does not show {name}, which is there",
        hint="the listing is behind: try again",
        file=name,
    )


# What a verdict of the ledger is about.
_WHOLE = (EntryClass.COMMITTED, EntryClass.CORRUPT)


def read_entries(
    root: Root, how: ScanOptions, *, only: str = "", counter: Counter = NULL
) -> list[ScannedEntry]:
    """Return all entries of one root, with their holds; or the one candidate that `only` names.

    Raises:
        UnavailableError, DeniedError: something could not be listed.
        UnsafeError: the root's `.ftckpt` is a link.
    """
    evidence = EntryHolds.of(root, how.now)
    wanted = [c for c in root.candidates if only in ("", c.entry.path)]
    counter.start("reading", len(wanted), "entries")

    def one(candidate: Candidate) -> ScannedEntry | None:
        try:
            found = classify(root, candidate, how)
        except NotFoundError:
            found = None  # gone since it was listed: it cannot be dropped, and no rule counts it
        counter.add(1)
        return None if found is None else evidence.added_to(found)

    listed = [f for f in concurrently(root.store, one, wanted) if f is not None]
    # Entries dropped in place (`classify`) belong to the trash.
    dropped = {f.entry.name: f for f in listed if f.entry.entry_class is EntryClass.TRASH}
    there = with_known_steps(root, [f for f in listed if f.entry.name not in dropped])
    standing = with_verdicts(root, there)
    if only:
        return standing
    trash = (
        f.now(contents=dropped[f.entry.name].entry.contents) if f.entry.name in dropped else f
        for f in _trash(root)
    )
    return [*standing, *_foreign(root), *_alone(root, how, evidence), *trash]


def with_known_steps(root: Root, members: Sequence[ScannedEntry]) -> list[ScannedEntry]:
    """Return entries with the steps that neither their names nor their headers say.

    That is the rule of `latest` (`ftckpt.discovery.siblings`).
    """
    paths = [relative(root.base, f.entry.name) for f in members]
    looked = [
        Looked(Candidate(path, f.place, f.entry.step, False), f.child)
        for path, f in zip(paths, members, strict=True)
        if f.entry.entry_class is not EntryClass.TRASH
    ]
    known = {one.candidate.path: one.known_step for one in with_steps(root, looked)}
    return [
        f.now(step=known[path]) if f.entry.step is None and path in known else f
        for path, f in zip(paths, members, strict=True)
    ]


def with_verdicts(root: Root, members: Sequence[ScannedEntry]) -> list[ScannedEntry]:
    """Return entries with what the root's ledger says of them; one that is bad does not count.

    Raises:
        UnavailableError, DeniedError: the ledger could not be read.
    """
    asked = {
        f.entry.name: CheckedPlace(root.store, f.child.part)
        for f in members
        if f.child is not None and f.entry.entry_class in _WHOLE
    }
    found = Ledger(root.store, root.base).standings(list(asked.values()))
    known = dict(zip(asked, found, strict=True))
    return [judged_as(f, known.get(f.entry.name, ContentStanding())) for f in members]


def judged_as(found: ScannedEntry, known: ContentStanding) -> ScannedEntry:
    """Return a committed entry with what a ledger knows of it."""
    one = known.bad or known.good or known.last
    if one is None:
        return found
    said = one.verdict
    verdict = EntryVerdict(
        said.code, said.level, said.read, said.evidence, said.checked, said.by, said.reason, one.own
    )
    found = found.now(verdict=verdict)
    if known.bad is None or found.entry.entry_class is not EntryClass.COMMITTED:
        return found
    proven = one.own and said.code == ExitCode.CORRUPT
    kind = EntryClass.CORRUPT if proven else EntryClass.UNSAFE
    return found.now(entry_class=kind, why=f"{said.reason} (checked by {said.by})")


def _foreign(root: Root) -> Iterator[ScannedEntry]:
    for name in root.foreign:
        if not is_own(name) and not name.startswith(BESIDE):
            yield of_no_checkpoint(root, name)


def of_no_checkpoint(root: Root, name: str) -> ScannedEntry:
    """Return what lies in a root under a name that is not a checkpoint's."""
    place = Entry(join(root.base, name), 0)
    why = LEFT if is_leftover(name) else "its name is not a checkpoint's"
    entry = RootEntry(place.path, root.base, EntryClass.FOREIGN, why=why)
    return with_needs(ScannedEntry(entry, root, place), None)


def _alone(root: Root, how: ScanOptions, evidence: EntryHolds) -> Iterator[ScannedEntry]:
    """Yield manifests without their files, which a killed seal leaves in an object store.

    Their files were freed or removed by hand; such a manifest is dropped like an abandoned save.
    """
    if root.store.traits.local:
        return
    there = {candidate.path for candidate in root.candidates} | set(root.foreign)
    for name in root.foreign:
        described = name.removesuffix(SUFFIX)
        # Entries with a tombstone are in the trash and reported there.
        if described in (name, "") or described in there or name in root.tombs:
            continue
        if f".{described}.ftckpt-staging" in there:  # a one-file conversion publishes it second
            continue
        with suppress(NotFoundError):
            place = root.store.stat(join(root.base, name))
            why = alone_of(root.store, [place])
            if not why:
                continue
            entry = RootEntry(
                name=place.path,
                group=root.base,
                entry_class=_age_class(place, how.now),
                step=step_in_name(described),
                time=place.mtime,
                why=why,
                contents=sum_up([place]),
            )
            yield evidence.added_to(ScannedEntry(entry, root, place))


def _age_class(place: Entry, now: float) -> EntryClass:
    silent = place.mtime is not None and now - place.mtime >= GRACE
    return EntryClass.ABANDONED if silent else EntryClass.STAGING


def _trash(root: Root) -> Iterator[ScannedEntry]:
    below = [Entry(join(root.base, n), 0) for n in root.foreign if n.startswith(BESIDE)]
    if FOLDER in root.foreign:
        with suppress(NotFoundError):
            below += root.store.children(f"{own_folder(root)}/{TRASH}")
    paths = {place.path for place in below}
    for place in below:
        if place.path.removesuffix(SUFFIX) in paths - {place.path}:
            continue  # the manifest of another one
        was = parse_trash_name(place.path.rpartition("/")[2])
        entry = RootEntry(
            name=place.path,
            group=root.base,
            entry_class=EntryClass.TRASH,
            step=was and step_in_name(was[0]),
            time=was[1] if was else place.mtime,
            why=f"dropped before; it was {was[0]}" if was else "dropped before",
        )
        yield ScannedEntry(entry, root, place)
