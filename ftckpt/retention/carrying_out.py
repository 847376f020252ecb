"""Carry a plan out: exactly what it shows goes, as long as it is still as the plan saw it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ftckpt.errors import FtckptError, NotFoundError, RefusedError
from ftckpt.opening import Place, open_runs
from ftckpt.progress import NULL, Counter
from ftckpt.registry import Format
from ftckpt.roots import Root, read_again

from . import log
from .checking import surveyed
from .classifying import classify
from .document import plan_id
from .entries import EntryClass, RootEntry
from .evidence import Evidence
from .floors import broken_floors
from .found import Bases, Found, Reading, no_bases
from .holding import hold, require_clock
from .outcome import Applied, Purged
from .plan import Decision, Plan
from .preparing import Prepared, prepare
from .protections import reckon
from .purging import purge_held, require_all
from .trash import Trash, Trashed, open_trash


def apply(
    plan: Plan,
    place: Place,
    formats: Sequence[Format],
    *,
    actor: str,
    now: Callable[[], float],
    purge_now: bool = False,
    trash_ttl: float | None = None,
    bases: Bases = no_bases,
    counter: Counter = NULL,
) -> Applied:
    """Drop what a plan drops, in its order, and nothing else.

    The root is read again first, under a lock. Where anything that is to go has changed, or would
    stay by now, nothing is touched. Right before each entry goes it is asked once more who holds it
    and whether it is the same; if not it stays, with what it is built upon. What has gone by
    itself, is being removed by somebody else, or went in an earlier run of the same plan is no
    failure.

    Args:
        plan: as `prepare` or `document.load_plan` gave it.
        place: what it was made for.
        formats: in asking order.
        actor: who, for the log.
        now: returns seconds since the epoch.
        purge_now: reclaim at once what would go into the trash.
        trash_ttl: reclaim first what has lain in the trash for so many seconds (see
            `purging.purge`); None leaves the trash alone.
        bases: returns what a checkpoint is a delta upon (see `Reading`).
        counter: is told of the work.

    Raises:
        RefusedError: the plan breaks a floor, or is stale; another gc is at work; the clock has
            gone back. Nothing was touched.
        NotFoundError: the place holds no checkpoint.
        UnavailableError, DeniedError: something could not be read; nothing was touched.
        UnsafeError: a link stands where a root's own files belong.
        UnsupportedError: the store keeps no trash.
    """
    plan.require()
    roots = open_runs(place, formats)
    concerned = {d.entry.group for d in plan.drop}
    purging = trash_ttl is not None
    wanted = [r for r in roots if r.base in concerned or (purging and open_trash(r).listed())]
    with hold(wanted, actor, now()) as trashes:
        require_clock(wanted, now())
        going, absent, fresh = _still_right(
            plan, place, formats, now(), set(trashes), bases, counter
        )
        known = [r for r in roots if r.base in {d.entry.group for d in plan.decisions}]
        told = [r.base for r in known if going and _tell(r, plan, going, actor, now())]
        how = Reading(formats, now(), plan.policy.metric, bases)
        purged = None
        if trash_ttl is not None:
            purged = purge_held(
                roots, trashes, how, actor=actor, trash_ttl=trash_ttl, now=now, counter=counter
            )
        dropping = _Dropping(plan, fresh, trashes, how, actor, now, purge_now)
        counter.start("dropping", len(going), "entries")
        for decision in going:
            dropping.drop(decision)
            counter.add(1)
        applied = dropping.applied(absent, purged)
        unsaid = []
        for root in known:
            if going and root.base not in told:
                _tell(root, plan, going, actor, now())
            if not _tell_end(root, applied, actor, now()):
                unsaid.append(f"there was no room in the log of {root.url} for what was done")
        return replace(applied, notes=tuple(unsaid))


def _still_right(
    plan: Plan,
    place: Place,
    formats: Sequence[Format],
    now: float,
    held: set[str],
    bases: Bases,
    counter: Counter,
) -> tuple[list[Decision], list[str], Prepared | None]:
    """Read everything again; return what is to go, what has gone, and what was read.

    Raises:
        RefusedError: the plan is stale.
    """
    if not plan.drop:
        return [], [], None
    # What frees enough is for the plan to say; whether a thing may go is for the rules alone.
    policy = replace(plan.policy, reclaim=None)
    fresh = prepare(place, formats, policy, now, bases=bases, known=plan, counter=counter)
    if place.url != plan.url and not any(d.entry.name in fresh.found for d in plan.decisions):
        raise RefusedError(
            f"nothing of the plan is at {place.url}", hint=f"it was made for {plan.url}"
        )
    going, absent = [], []
    for decision in plan.drop:
        found = fresh.found.get(decision.entry.name)
        if found is not None and found.entry.entry_class is not decision.entry.entry_class:
            found = surveyed(found)
        # What lies in a run that is not held was not there when the runs were read.
        if found is None or found.entry.group not in held or _is_leaving(decision, found.entry):
            absent.append(decision.entry.name)
        else:
            going.append(decision)
    stale = list(_stale(going, fresh))
    if stale:
        more = f" (and {len(stale) - 1} more)" if len(stale) > 1 else ""
        raise RefusedError(
            f"the plan is stale: {stale[0]}{more}; nothing was touched", hint="make a new plan"
        )
    _require_floors(plan, going, fresh)
    return going, absent, fresh


def _stale(going: Sequence[Decision], fresh: Prepared) -> Iterator[str]:
    """Yield in words what is not as the plan saw it."""
    decided = {d.entry.name: d for d in fresh.plan.decisions}
    leaving = {d.entry.name for d in going}
    for decision in going:
        name = decision.entry.name
        if decided[name].keep:
            yield f"{name} stays now ({decided[name].reasons[0]})"
        elif not _same(decision, decided[name].entry):
            yield f"{name} has changed"
    for name, found in fresh.found.items():
        below = [base for base in found.entry.bases if base in leaving]
        if below and name not in leaving:
            yield f"{name} is a delta upon {below[0]}"


def _same(decision: Decision, entry: RootEntry) -> bool:
    then, now = decision.entry.contents, entry.contents
    return then is not None and now is not None and then.fingerprint == now.fingerprint


def _is_leaving(decision: Decision, entry: RootEntry) -> bool:
    """Whether somebody else removes it at this moment: a trainer that rotates."""
    then, now = decision.entry.contents, entry.contents
    return then is not None and now is not None and now.files < then.files


def _require_floors(plan: Plan, going: Sequence[Decision], fresh: Prepared) -> None:
    groups: dict[str, list[RootEntry]] = defaultdict(list)
    for found in fresh.found.values():
        groups[found.entry.group].append(found.entry)
    runs = {group: reckon(members, fresh.plan.now) for group, members in groups.items()}
    times = {group: log.last_applied(root) for group, root in fresh.roots.items()}
    last_run = {group: time for group, time in times.items() if time is not None}
    dropped = [fresh.found[d.entry.name].entry for d in going]
    broken = tuple(broken_floors(plan.policy, runs, dropped, last_run))
    replace(plan, broken=broken).require()


class _Dropping:
    """Drops one entry after the other."""

    def __init__(
        self,
        plan: Plan,
        fresh: Prepared | None,
        trashes: Mapping[str, Trash],
        how: Reading,
        actor: str,
        now: Callable[[], float],
        purge_now: bool,
    ) -> None:
        self.plan = plan
        self.found = {} if fresh is None else dict(fresh.found)
        self.trashes = trashes
        self.how = how
        self.actor = actor
        self.now = now
        self.purge_now = purge_now
        self.dropped: list[Decision] = []
        self.trashed: list[Trashed] = []
        self.absent: list[str] = []
        self.failed: dict[str, FtckptError] = {}
        self.freed = 0
        self.last = 0.0

    def drop(self, decision: Decision) -> None:
        """Drop one, or note why not."""
        name = decision.entry.name
        try:
            self._drop(decision)
        except NotFoundError:
            self.absent.append(name)
            del self.found[name]
        except FtckptError as error:
            self.failed[name] = error

    def _drop(self, decision: Decision) -> None:
        found = self._looked_at_again(decision)
        trash = self.trashes[found.entry.group]
        # No two at one time, so that the trash keeps the order, and a delta goes before its base.
        self.last = max(self.now(), self.last + 1e-6)
        thing = trash.discard(found, decision, actor=self.actor, now=self.last)
        del self.found[decision.entry.name]
        self.dropped.append(decision)
        if not self.purge_now:
            self.trashed.append(thing)
            return
        nbytes, errors = trash.erase(thing)
        self.freed += nbytes
        require_all(errors)

    def _looked_at_again(self, decision: Decision) -> Found:
        """Return the entry as it is at this moment, if it may still go.

        Raises:
            NotFoundError: it is gone.
            RefusedError: it may not.
        """
        name = decision.entry.name
        found = self.found[name]
        root = read_again(found.root)
        self._note_new(root)
        for other in self.found.values():
            if name in other.entry.bases:
                raise RefusedError(f"{name} stays: {other.entry.name} is a delta upon it")
        held = Evidence.of(root, self.now()).added_to(found).entry
        tags = set(held.tags) & set(self.plan.policy.keep_tags)
        if held.pins or held.pointers or held.leases or tags:
            raise RefusedError(f"{name} stays: since the plan was made somebody has claimed it")
        listed = surveyed(found.now(contents=None))
        if listed is None or _is_leaving(decision, listed.entry):
            raise NotFoundError(f"{name} is gone, or going")
        if not _same(decision, listed.entry):
            raise RefusedError(f"{name} stays: it has changed since the plan was made")
        return listed

    def _note_new(self, root: Root) -> None:
        """Read what has been saved meanwhile: it may be a delta upon what is to go."""
        for candidate in root.candidates:
            known = self.found.get(candidate.entry.path)
            if known is None or known.entry.entry_class is EntryClass.STAGING:
                with suppress(NotFoundError):
                    self.found[candidate.entry.path] = classify(root, candidate, self.how)

    def applied(self, absent: Sequence[str], purged: Purged | None) -> Applied:
        """Return what it came to."""
        waiting = 0 if self.purge_now else sum(d.frees or 0 for d in self.dropped)
        return Applied(
            plan=plan_id(self.plan),
            dropped=tuple(self.dropped),
            trashed=tuple(self.trashed),
            absent=(*absent, *self.absent),
            freed=self.freed,
            waiting=waiting,
            purged=purged,
            failed=self.failed,
        )


def _tell(root: Root, plan: Plan, going: Sequence[Decision], actor: str, now: float) -> bool:
    """Log what is about to go and why, and why the rest stays; False where there is no room."""
    here = [d for d in plan.decisions if d.entry.group == root.base]
    names = {d.entry.name for d in going}
    drop = {d.entry.name: [str(r) for r in d.reasons] for d in here if d.entry.name in names}
    keep = {d.entry.name: [r.rule for r in d.reasons] for d in here if d.keep}
    fields = {"plan": plan_id(plan), "actor": actor, "drop": drop, "keep": keep}
    return not drop or log.append_if_room(root, log.APPLYING, now, fields)


def _tell_end(root: Root, applied: Applied, actor: str, now: float) -> bool:
    dropped = [d.entry.name for d in applied.dropped if d.entry.group == root.base]
    fields = {
        "plan": applied.plan,
        "actor": actor,
        "dropped": dropped,
        "trash": [t.id for t in applied.trashed if t.group == root.base],
        "absent": list(applied.absent),
        "failed": {name: error.message for name, error in applied.failed.items()},
    }
    return log.append_if_room(root, log.APPLIED, now, fields)
