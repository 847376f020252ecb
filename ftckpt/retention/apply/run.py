"""Carry out a plan: drop exactly its entries, if they are still as the plan saw them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ftckpt.discovery.recognise import Format
from ftckpt.discovery.resolve import Place, open_runs
from ftckpt.discovery.roots import Root
from ftckpt.errors import FtckptError, NotFoundError, RefusedError
from ftckpt.progress import NULL, Counter
from ftckpt.retention.document import plan_id
from ftckpt.retention.locks.hold import hold, require_clock
from ftckpt.retention.policy.plan import Decision, RetentionPlan
from ftckpt.retention.records import log
from ftckpt.retention.scan.entries import EntryClass, RootEntry
from ftckpt.retention.scan.entry import (
    Bases,
    ScannedEntry,
    ScanOptions,
    fingerprint_but_targets,
    fingerprint_of,
    list_entry,
    recorded_bases,
)
from ftckpt.retention.scan.staleness import is_leaving, is_same, still_right
from ftckpt.retention.trash import Trash, Trashed
from ftckpt.retention.trash.open import open_trash

from .check import surveyed
from .outcome import Applied
from .prepare import Check
from .purge import has_remains, purge_held, require_all
from .recheck import Watch


def apply(
    plan: RetentionPlan,
    place: Place,
    formats: Sequence[Format],
    *,
    actor: str,
    now: Callable[[], float],
    purge_now: bool = False,
    trash_ttl: float | None = None,
    bases: Bases = recorded_bases,
    check: Check | None = None,
    counter: Counter = NULL,
) -> Applied:
    """Drop a plan's entries, in its order, and nothing else.

    Reads the root again under a lock. If an entry to be dropped has changed or is now kept, nothing
    is touched. Before each drop it checks claims and identity again; an entry that fails stays, and
    so do its bases. Entries that are gone, that somebody else is removing, or that an earlier run
    of the same plan dropped are not errors.

    Args:
        plan: from `prepare` or `document.load_plan`.
        place: the place of the plan.
        formats: in the order in which they are tried.
        actor: for the log.
        now: returns seconds since the epoch.
        purge_now: free entries at once instead of moving them to the trash.
        trash_ttl: first purge trash older than this many seconds (see `purge`); None: do not.
        bases: returns a checkpoint's bases (see `ScanOptions`); default: those that its format
            records. `no_bases` lets the bases of kept deltas go.
        check: reads the content of survivors (see `prepare`); None: nobody asks for it.
        counter: counts entries.

    Raises:
        RefusedError: the plan breaks a floor or is stale; another gc is running; the clock has gone
            back. Nothing was touched.
        NotFoundError: the place holds no checkpoint.
        UnavailableError, DeniedError: something could not be read; nothing was touched.
        UnsafeError: a link stands in place of a root's own files.
        UnsupportedError: the store keeps no trash.
    """
    plan.require()
    roots = open_runs(place, formats)
    concerned = {d.entry.group for d in plan.drop}
    wanted = [r for r in roots if r.base in concerned]
    if trash_ttl is not None:
        others = (r for r in roots if r.base not in concerned)
        wanted += [r for r in others if open_trash(r).listed() or has_remains(r, now())]
    identity = plan_id(plan)
    with hold(wanted, actor, now()) as trashes:
        require_clock(wanted, now())
        current = still_right(
            plan, place, formats, now(), trashes, bases=bases, check=check, counter=counter
        )
        groups = {d.entry.group for d in plan.decisions}
        logged = [root for root in roots if root.base in groups]
        before = {root.base: _intent(root, plan, current.going, actor) for root in logged}
        untold = [r for r in logged if not _tell(r, log.APPLYING, now(), identity, before[r.base])]
        how = ScanOptions(formats, now(), plan.policy.metric, bases, needs=True)
        purged = None
        if trash_ttl is not None:
            purged = purge_held(
                roots, trashes, how, actor=actor, trash_ttl=trash_ttl, now=now, counter=counter
            )
        dropping = Dropping(
            plan, current.found, trashes, how, actor, now, purge_now=purge_now, going=current.going
        )
        counter.start("dropping", len(current.going), "entries")
        for decision in current.going:
            dropping.drop(decision)
            counter.add(1)
        applied = Applied(
            plan=identity,
            dropped=tuple(dropping.dropped),
            trashed=tuple(dropping.trashed),
            absent=(*current.absent, *dropping.absent),
            freed=dropping.freed,
            waiting=dropping.waiting,
            purged=purged,
            failed=dropping.failed,
        )
        for root in untold:  # there may be room by now
            _tell(root, log.APPLYING, now(), identity, before[root.base])
        after = {root.base: _result(root, plan, applied, actor) for root in logged}
        untold = [r for r in logged if not _tell(r, log.APPLIED, now(), identity, after[r.base])]
    notes = [f"there was no room in the log of {root.url} for what was done" for root in untold]
    if not purge_now:
        forced = "{} was reclaimed at once: there was no room for its name in the trash"
        notes += [forced.format(name) for name in dropping.forced]
    return replace(applied, notes=tuple(notes))


class Dropping:
    """Drops entries one by one; tracks what still stands and what that depends on.

    Of those `going` that depend on each other none holds the other.
    With `thins` the weights of what goes stay: a tag that keeps it does not hold it whole.
    """

    def __init__(
        self,
        plan: RetentionPlan,
        found: Mapping[str, ScannedEntry],
        trashes: Mapping[str, Trash],
        how: ScanOptions,
        actor: str,
        now: Callable[[], float],
        *,
        purge_now: bool,
        going: Sequence[Decision] = (),
        thins: bool = False,
    ) -> None:
        self.plan = plan
        self.keep_tags = frozenset() if thins else frozenset(plan.policy.keep_tags)
        self.trashes = trashes
        self.how = how
        self.actor = actor
        self.now = now
        self.purge_now = purge_now
        self._seen: dict[str, str] = {}
        self._going = {decision.entry.name: decision for decision in going}
        self.dropped: list[Decision] = []
        self.trashed: list[Trashed] = []
        self.absent: list[str] = []
        self.failed: dict[str, FtckptError] = {}
        self.forced: list[str] = []
        self.freed = 0
        self.waiting = 0
        self._last = 0.0
        self._standing: dict[str, ScannedEntry] = {}
        self._dependants: dict[str, dict[str, None]] = defaultdict(dict)
        self._watches: dict[str, Watch] = {}
        for one in found.values():
            self._stands(one)

    def drop(self, decision: Decision) -> None:
        """Drop one entry, or record why not."""
        name = decision.entry.name
        try:
            self._drop(decision)
        except NotFoundError:
            self.absent.append(name)
            self._is_gone(name)
        except FtckptError as error:
            self.failed[name] = error

    def _drop(self, decision: Decision) -> None:
        found = self._looked_at_again(decision)
        trash = self.trashes[found.entry.group]
        # Times are unique, so that the trash keeps the order: a delta goes before its base.
        self._last = max(self.now(), self._last + 1e-6)
        thing = trash.discard(
            found, decision, actor=self.actor, now=self._last, final=self.purge_now
        )
        if not thing.erasing:
            self._require_unclaimed(found, trash, thing)
        self._is_gone(decision.entry.name)
        self.dropped.append(decision)
        if not self.purge_now and not thing.erasing:
            self.trashed.append(thing)
            self.waiting += decision.frees or 0
            return
        nbytes, errors = trash.erase(thing)
        if thing.erasing:
            self.forced.append(decision.entry.name)
            nbytes = decision.frees or 0  # most of it had gone before
        self.freed += nbytes
        require_all(errors)

    def _require_unclaimed(self, found: ScannedEntry, trash: Trash, thing: Trashed) -> None:
        """Restore an entry that was claimed between the last look and its drop.

        A claimant looks afterwards whether the entry exists (`records.write`), so one of the two
        finds the other.

        Raises:
            RefusedError: it was claimed, and is restored.
        """
        try:
            held, news = self._watch(found).look(found, self.now())
            for one in news:
                self._stands(one)
            claimed = self._is_claimed(held) or any(
                found.entry.name in one.entry.depends_on for one in news
            )
        except FtckptError:
            trash.restore(thing)  # nothing is concluded
            raise
        if claimed:
            trash.restore(thing)
            raise RefusedError(f"{thing.entry} stays: somebody has claimed it in this moment")

    def _looked_at_again(self, decision: Decision) -> ScannedEntry:
        """Return the entry as it is now, if it may still be dropped.

        Raises:
            NotFoundError: it is gone.
            RefusedError: it may not be dropped.
        """
        found = self._unclaimed(decision)
        # Entries that link to each other go one after the other, if all of them may.
        for other in self._in_a_loop_with(decision.entry.name):
            try:
                self._require_unchanged(self._unclaimed(self._going[other]))
            except NotFoundError as error:
                why = f"{decision.entry.name} stays: {other} depends on it, and is going"
                raise RefusedError(why) from error
        return found

    def _require_unchanged(self, found: ScannedEntry) -> None:
        """Remember an entry as the plan saw it: its links lead nowhere once their targets went.

        Raises:
            NotFoundError: it is gone.
            RefusedError: it has changed.
        """
        name = found.entry.name
        files = list_entry(found.root.store, found.place)
        contents = self._going[name].entry.contents
        if name in self._seen:
            return
        if contents is None or fingerprint_of(files) != contents.fingerprint:
            raise RefusedError(f"{name} stays: it has changed since the plan was made")
        self._seen[name] = fingerprint_but_targets(files)

    def _in_a_loop_with(self, name: str) -> list[str]:
        """Return the entries that depend on one, all of which it depends on itself.

        Raises:
            RefusedError: there are others, or one of them stays.
        """
        above = self._closed([name], lambda one: self._dependants[one])
        below = self._closed([name], lambda one: self._standing[one].entry.depends_on)
        for other in above:
            if other not in below or other not in self._going:
                raise RefusedError(f"{name} stays: {other} depends on it")
        return above

    def _closed(self, names: list[str], step: Callable[[str], Iterable[str]]) -> list[str]:
        """Return what standing entries lead to by steps, without the first of them."""
        seen = dict.fromkeys(names)
        waiting = list(names)
        while waiting:
            for one in step(waiting.pop()):
                if one in self._standing and one not in seen:
                    seen[one] = None
                    waiting.append(one)
        return list(seen)[len(names) :]

    def _unclaimed(self, decision: Decision) -> ScannedEntry:
        """Return an entry as it is now, if nobody has claimed or changed it.

        Raises:
            NotFoundError: it is gone.
            RefusedError: it stays.
        """
        name = decision.entry.name
        found = self._standing[name]
        held, news = self._watch(found).look(found, self.now())
        for one in news:
            self._stands(one)
        if self._is_claimed(held):
            raise RefusedError(f"{name} stays: since the plan was made somebody has claimed it")
        listed = surveyed(found.now(contents=None))
        if listed is None or is_leaving(decision, listed.entry):
            raise NotFoundError(f"{name} is gone, or going")
        if not is_same(decision, listed.entry) and not self._lost_targets(listed):
            raise RefusedError(f"{name} stays: it has changed since the plan was made")
        return listed

    def _is_claimed(self, held: RootEntry) -> bool:
        tagged = self.keep_tags.intersection(held.tags)
        return bool(held.pins or held.pointers or held.leases or tagged)

    def _lost_targets(self, found: ScannedEntry) -> bool:
        """Whether an entry has not changed but for what its links led to."""
        seen = self._seen.get(found.entry.name)
        if seen is None:
            return False
        return fingerprint_but_targets(list_entry(found.root.store, found.place)) == seen

    def _watch(self, found: ScannedEntry) -> Watch:
        group = found.entry.group
        if group not in self._watches:
            unfinished = {
                name
                for name, one in self._standing.items()
                if one.entry.entry_class is EntryClass.STAGING
            }
            self._watches[group] = Watch(found.root, self.how, unfinished)
        return self._watches[group]

    def _stands(self, found: ScannedEntry) -> None:
        name = found.entry.name
        self._forget(name)
        self._standing[name] = found
        for path in found.entry.depends_on:
            self._dependants[path][name] = None

    def _is_gone(self, name: str) -> None:
        found = self._forget(name)
        if found is not None and found.entry.group in self._watches:
            self._watches[found.entry.group].forget(found)

    def _forget(self, name: str) -> ScannedEntry | None:
        found = self._standing.pop(name, None)
        for path in found.entry.depends_on if found is not None else ():
            self._dependants[path].pop(name, None)
        return found


def _intent(
    root: Root, plan: RetentionPlan, going: Sequence[Decision], actor: str
) -> Mapping[str, object]:
    """Return, for the log, what will be dropped and why, and why the rest stays."""
    drop = {d.entry.name: [str(r) for r in d.reasons] for d in going if d.entry.group == root.base}
    if not drop:
        return {}
    kept = (d for d in plan.keep if d.entry.group == root.base)
    keep = {d.entry.name: [r.rule for r in d.reasons] for d in kept}
    return {"actor": actor, "drop": drop, "keep": keep}


def _result(root: Root, plan: RetentionPlan, applied: Applied, actor: str) -> Mapping[str, object]:
    return {
        **({"named": list(plan.policy.only)} if plan.policy.only else {}),
        "actor": actor,
        "dropped": [d.entry.name for d in applied.dropped if d.entry.group == root.base],
        "trash": [t.id for t in applied.trashed if t.group == root.base],
        "absent": list(applied.absent),
        "failed": {name: error.message for name, error in applied.failed.items()},
    }


def _tell(root: Root, event: str, now: float, identity: str, fields: Mapping[str, object]) -> bool:
    """Write to the log, if there is anything to log; return False if the filesystem is full."""
    return not fields or log.append_if_room(root, event, now, {"plan": identity, **fields})
