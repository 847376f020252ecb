"""Free trash older than its time to live, unless something needs it.

Restore dropped checkpoints from the trash.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from ftckpt.discovery.recognise import Format
from ftckpt.discovery.resolve import Place, open_runs
from ftckpt.discovery.roots import Root, read_again
from ftckpt.errors import FtckptError, NotFoundError, UsageError
from ftckpt.progress import NULL, Counter
from ftckpt.retention.locks import leases
from ftckpt.retention.locks.hold import SKEW, hold, require_clock
from ftckpt.retention.policy import DAY
from ftckpt.retention.policy.plan import Reason
from ftckpt.retention.policy.select import nearest_of
from ftckpt.retention.records import log, pins
from ftckpt.retention.scan.entries import EntryClass, RootEntry
from ftckpt.retention.scan.entry import Bases, ScannedEntry, ScanOptions, recorded_bases
from ftckpt.retention.scan.leftovers import (
    abort_own,
    dead_plans,
    has_dead_uploads,
    leftovers,
    remove_dead_plans,
    remove_leftovers,
)
from ftckpt.retention.scan.read import read_entries
from ftckpt.retention.trash import Trash, Trashed, parse_trash_name
from ftckpt.retention.trash.open import open_trash

from .check import checked
from .outcome import Purged, Undeleted

TRASH_TTL = DAY
# Drops of one run differ by less than this in time, so all of them are freed together.
_APART = 1.0


def purge(
    place: Place,
    formats: Sequence[Format],
    *,
    actor: str,
    now: Callable[[], float],
    trash_ttl: float = TRASH_TTL,
    bases: Bases = recorded_bases,
    counter: Counter = NULL,
) -> Purged:
    """Free what was dropped at least `trash_ttl` seconds ago in the roots of a place.

    Entries dropped in the future (by name) stay, and so does what checkpoints depend on and what a
    pin, lease or pointer names while nothing else has that name. An interrupted purge is continued.

    Args:
        place: a root, or a directory of several.
        formats: in the order in which they are tried.
        actor: for the log.
        now: returns seconds since the epoch.
        trash_ttl: seconds.
        bases: returns a checkpoint's bases (see `ScanOptions`); default: those that its format
            records. `no_bases` lets the bases of kept deltas go.
        counter: counts entries.

    Raises:
        RefusedError: another gc is running, or the clock has gone back.
        UnavailableError, DeniedError: something could not be read; nothing was freed.
        UnsupportedError: the store keeps no trash.
        UnsafeError: a link stands in place of a root's own files.
    """
    roots = open_runs(place, formats)
    filled = [root for root in roots if open_trash(root).listed() or has_remains(root, now())]
    with hold(filled, actor, now()) as trashes:
        require_clock(filled, now())
        how = ScanOptions(formats, now(), bases=bases, needs=True)
        return purge_held(
            roots, trashes, how, actor=actor, trash_ttl=trash_ttl, now=now, counter=counter
        )


def purge_held(
    roots: Sequence[Root],
    trashes: Mapping[str, Trash],
    how: ScanOptions,
    *,
    actor: str,
    trash_ttl: float,
    now: Callable[[], float],
    counter: Counter = NULL,
) -> Purged:
    """Free expired trash in locked roots (see `purge`).

    `roots` are all of the place, because a checkpoint of one may be the base of another's delta;
    `trashes` are those of the locked ones, by group.
    """
    things = [thing for trash in trashes.values() for thing in trash.listed()]
    begun = {t.path for t in things if t.erasing and not trashes[t.group].is_whole(t)}
    over = [t for t in things if t.path in begun or _is_over(t, how.now, trash_ttl)]
    recalled = [t for t in over if trashes[t.group].recall(t)]
    if recalled:
        roots = [read_again(root) for root in roots]
        over = [t for t in over if t not in recalled]
    held = _held(roots, trashes, over, begun, how, counter) if over else {}
    due = [t for t in over if t.path not in held]
    erased: list[Trashed] = []
    failed: dict[str, FtckptError] = {}
    freed = 0
    # Whose an upload is, is known by the marker of its transfer, which may lie in what is erased.
    notes = [note for root in roots if root.base in trashes for note in abort_own(root, now())]
    notes += [
        f"{t.entry} stands with its commit marker: its drop was killed, or ftckpt did not write "
        "its tombstone; it is not trash any more, and the next gc decides about it"
        for t in recalled
    ]
    counter.start("purging", len(due), "entries")
    for thing in due:
        try:
            nbytes, errors = trashes[thing.group].erase(thing)
            freed += nbytes
            require_all(errors)
            erased.append(thing)
        except FtckptError as error:
            failed[thing.path] = error
        counter.add(1)
    notes += [
        note
        for root in roots
        if root.base in trashes
        for note in (*remove_leftovers(root, now()), *remove_dead_plans(root, now()))
    ]
    purged = Purged(erased=tuple(erased), held=held, freed=freed, failed=failed, notes=tuple(notes))
    for root in roots:
        _log(root, purged, actor, now())
    return purged


def has_remains(root: Root, now: float) -> bool:
    """Say whether a root holds what runs of ftckpt have left and a purge removes."""
    return bool(leftovers(root, now) or dead_plans(root, now) or has_dead_uploads(root, now))


def _is_over(thing: Trashed, now: float, trash_ttl: float) -> bool:
    """Whether the time of a thing is up, or unknown; its record is as old as the store says."""
    age = now - thing.time
    if thing.written is not None and thing.written > thing.time:
        age = max(0.0, now - thing.written)
    return age < -SKEW or max(0.0, age + _APART) >= trash_ttl


def require_all(errors: Mapping[str, FtckptError]) -> None:
    """Raise the first of the errors of an erasure, with their number."""
    for error in errors.values():
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise type(error)(error.message + more, hint=error.hint, kind=error.kind, file=error.file)


def _held(
    roots: Sequence[Root],
    trashes: Mapping[str, Trash],
    over: Sequence[Trashed],
    begun: Collection[str],
    how: ScanOptions,
    counter: Counter,
) -> dict[str, Reason]:
    """Return, by path, why expired things stay; of those whose erasure has begun none does."""
    found = [f for root in roots for f in read_entries(root, how, counter=counter)]
    live = {f.entry.name for f in found}
    based_on = {path: f.entry.name for f in found for path in f.entry.depends_on}
    by_group = {root.base: root for root in roots}
    successors = _Successors(found, how.now)
    held: dict[str, Reason] = {}
    for thing in over:
        if not trashes[thing.group].is_ours(thing):
            held[thing.path] = Reason("stranger", "its owner did not drop it; move it back by hand")
        elif thing.path in begun:
            continue  # it is not whole any more and cannot be restored
        elif thing.time > how.now + SKEW:
            held[thing.path] = Reason("future", "it was dropped in the future, by its name")
        elif thing.entry in live:
            continue  # a record of this name means its new owner
        elif thing.entry in based_on:
            held[thing.path] = Reason("base", f"{based_on[thing.entry]} depends on it")
        else:
            reason = next(_wanted(by_group[thing.group], thing, how.now), None)
            if (
                reason is None
                and not successors.has(thing)
                and trashes[thing.group].is_whole(thing)
            ):
                reason = Reason(
                    "last",
                    "the run has no good one of its step or a later one; gc undelete has it back",
                )
            if reason is not None:
                held[thing.path] = reason
    return held


class _Successors:
    """The newest good checkpoint of each run: one that was dropped is freed if it has a successor.

    gc keeps the newest, so that each has one when it is dropped. The successor may have gone or
    been damaged since, or no gc of ours has dropped the thing.
    """

    def __init__(self, found: Sequence[ScannedEntry], now: float) -> None:
        self._now = now
        self._members: dict[str, list[ScannedEntry]] = defaultdict(list)
        for one in found:
            if one.entry.entry_class is EntryClass.COMMITTED and one.child is not None:
                self._members[one.entry.group].append(one)
        self._good: dict[str, bool] = {}

    def has(self, thing: Trashed) -> bool:
        """Whether a good checkpoint stands that is not older than a thing, by step or by time."""
        return any(
            self._is_good(one)
            for one in sorted(self._members[thing.group], key=_newest_first)
            if _follows(one.entry, thing)
        )

    def _is_good(self, found: ScannedEntry) -> bool:
        name = found.entry.name
        if name not in self._good:
            now = checked(found, self._now, None)
            self._good[name] = now is not None and now.entry.checked and not now.entry.thinned
        return self._good[name]


def _newest_first(found: ScannedEntry) -> tuple[float, float]:
    entry = found.entry
    return -(entry.step if entry.step is not None else -1), -(entry.time or 0.0)


def _follows(entry: RootEntry, thing: Trashed) -> bool:
    if thing.step is None:
        return True  # of such a run no order is known
    later = entry.time is not None and entry.time > thing.time
    return later or (entry.step is not None and entry.step >= thing.step)


def _wanted(root: Root, thing: Trashed, now: float) -> Iterator[Reason]:
    """Yield who names a trashed thing whose name is free."""
    for pin in pins.pins(root):
        if pin.entry == thing.name:
            yield Reason("pinned", pin.who)
    for lease in leases.live(root, now):
        if lease.entry == thing.name:
            yield Reason("lease", f"{lease.holder} reads it")
    for pointer in root.pointers:
        same = pointer.step is not None and pointer.step == thing.step
        # A thing that was dropped in place still occupies its name.
        dangling = pointer.dangling or pointer.target == thing.name
        if dangling and (same or _last(pointer.says) == thing.name):
            yield Reason("pointer", f"{pointer.name} names it")
    for text in root.named_in_texts({thing.name}):
        yield Reason("pointer", f"{text} names it")


def _log(root: Root, purged: Purged, actor: str, now: float) -> None:
    erased = [t.id for t in purged.erased if t.group == root.base]
    failed = {name: error.message for name, error in purged.failed.items()}
    if erased or failed:
        fields = {"actor": actor, "erased": erased, "freed": purged.freed, "failed": failed}
        log.append_if_room(root, log.PURGED, now, fields)


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def trashed(place: Place, formats: Sequence[Format]) -> list[Trashed]:
    """Return the trash of every root of a place, the earliest first.

    Raises:
        UnavailableError, DeniedError: it could not be listed.
        UnsupportedError: the store keeps no trash.
    """
    found = [t for root in open_runs(place, formats) for t in open_trash(root).listed()]
    return sorted(found, key=lambda t: (t.time, t.entry))


def undelete(
    place: Place,
    formats: Sequence[Format],
    names: Sequence[str],
    *,
    actor: str,
    now: Callable[[], float],
    bases: Bases = recorded_bases,
) -> Undeleted:
    """Restore things from the trash under their old names.

    Of several with one name, the last dropped is restored. Existing names are never replaced; a
    thing that was restored before is not a failure.

    Args:
        place: a root, or a directory of several.
        formats: in the order in which they are tried.
        names: each a name from a plan, its last part, a step, or a `Trashed.id`.
        actor: for the log.
        now: returns seconds since the epoch.
        bases: returns a checkpoint's bases; notes name those that are still in the trash.

    Raises:
        UsageError: a name means things of several runs.
        RefusedError: another gc is running.
        UnavailableError, DeniedError: the trash could not be listed.
        UnsupportedError: the store keeps no trash.
    """
    roots = {root.base: root for root in open_runs(place, formats)}
    filled = [root for root in roots.values() if open_trash(root).listed()]
    restored: list[Trashed] = []
    failed: dict[str, FtckptError] = {}
    notes: list[str] = []
    with hold(filled, actor, now()) as trashes:
        things = [t for trash in trashes.values() for t in trash.listed()]
        meant = {name: _meant(name, things) for name in names}
        for name, thing in meant.items():
            if thing is None and any(_stands(name, read_again(r)) for r in roots.values()):
                notes.append(f"{name} is not in the trash: it stands in its place")
                continue
            try:
                if thing is None:
                    near = nearest_of(name, [one.name for one in things])
                    more = f"; {near}" if near else ""
                    raise NotFoundError(f"the trash of {place.url} holds no {name}{more}")
                trashes[thing.group].restore(thing)
                restored.append(thing)
            except FtckptError as error:
                failed[name] = error
        for group in trashes:
            ids = [t.id for t in restored if t.group == group]
            if ids:
                fields = {"actor": actor, "restored": ids}
                log.append_if_room(roots[group], log.UNDELETED, now(), fields)
        if restored:
            lying = [t for trash in trashes.values() for t in trash.listed()]
            notes += _left_behind(roots, restored, lying, bases)
    if restored:
        notes.append("the next gc by the same rules drops what came back again: pin it")
    return Undeleted(restored=tuple(restored), failed=failed, notes=tuple(notes))


def _left_behind(
    roots: Mapping[str, Root], restored: Sequence[Trashed], lying: Sequence[Trashed], bases: Bases
) -> Iterator[str]:
    """Yield notes on bases of restored entries that are still in the trash."""
    fresh = {group: read_again(roots[group]) for group in {t.group for t in (*restored, *lying)}}
    live = {c.entry.path for r in fresh.values() for c in r.candidates if not r.is_dropped(c)}
    missed = {t.entry for t in lying} - live
    back = {t.entry for t in restored}
    for root in fresh.values():
        for candidate in root.candidates:
            if not missed or candidate.entry.path not in back:
                continue
            with suppress(FtckptError):  # restored all the same; a reader reports the error
                child = root.recognise(candidate)
                for base in missed.intersection(bases(root, child) if child else ()):
                    yield (
                        f"{candidate.entry.path} is a delta based on {base}, which lies in the "
                        "trash too: have it back as well"
                    )


def _stands(name: str, root: Root) -> bool:
    """Whether a name means a thing that has left the trash, as after a killed run."""
    was = parse_trash_name(name)
    name = was[0] if was else name
    return any(
        name in (c.path, c.entry.path) or (name.isdecimal() and c.step == int(name))
        for c in root.candidates
        if not root.is_dropped(c)
    )


def _meant(name: str, things: Sequence[Trashed]) -> Trashed | None:
    """Return the thing that a name means; None if it means none.

    Raises:
        UsageError: it means things of several runs.
    """
    for same in (
        [t for t in things if name in (t.id, t.entry)],
        [t for t in things if t.name == name],
        [t for t in things if name.isascii() and name.isdecimal() and t.step == int(name)],
    ):
        if len({t.group for t in same}) > 1:
            raise UsageError(
                f"{name} was dropped from several runs",
                hint="name one: " + ", ".join(sorted({t.entry for t in same})),
            )
        if same:
            return max(same, key=lambda t: (not t.erasing, t.time))
    return None
