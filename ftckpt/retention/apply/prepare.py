"""From a place to a plan: read, decide, check what would be kept, and decide again.

A damaged checkpoint makes room for the next one in its rule; only kept entries are opened. The
files of dropped entries are listed, so the plan knows what it frees and can recognise them again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ftckpt.discovery.candidates import nothing_known
from ftckpt.discovery.pointers import SNAPSHOT, named_in_snapshot
from ftckpt.discovery.recognise import Format
from ftckpt.discovery.resolve import Place, open_runs
from ftckpt.discovery.roots import Root, concurrently
from ftckpt.errors import DeniedError, FtckptError, NotFoundError, UnavailableError
from ftckpt.findings import listed
from ftckpt.progress import NULL, Counter
from ftckpt.retention.policy import Policy
from ftckpt.retention.policy.decide import decide, unproven, unproven_floor
from ftckpt.retention.policy.metrics import best_in, best_of
from ftckpt.retention.policy.plan import Decision, RetentionPlan
from ftckpt.retention.policy.protections import group_entries, newest_first
from ftckpt.retention.records import log
from ftckpt.retention.scan.check_cache import Passed, read_passed, write_passed
from ftckpt.retention.scan.classify import judged_by
from ftckpt.retention.scan.entries import EntryClass, RootEntry, ScanDepth
from ftckpt.retention.scan.entry import (
    Bases,
    Run,
    ScannedEntry,
    ScanOptions,
    count_names,
    recorded_bases,
)
from ftckpt.retention.scan.leftovers import dead_plan_notes, upload_notes
from ftckpt.retention.scan.read import read_entries
from ftckpt.storage.store import join, relative

from .check import checked, first_verified, step_by_content, surveyed

_Look = Callable[[ScannedEntry], ScannedEntry | None]
Weigh = Callable[[ScannedEntry], int]
Check = Callable[[ScannedEntry], ScannedEntry]

# With these the storage does not answer; anything else says that one entry cannot be thinned.
_NO_ANSWER = (UnavailableError, DeniedError)

# Where transformers' Trainer says which checkpoint is the best so far, and its names of them.
_STATE, _TRAINERS = "trainer_state.json", re.compile(r"checkpoint-\d+")
# Names of Lightning's ModelCheckpoint, which says so in the checkpoint itself.
_LIGHTNING = re.compile(r".+\.ckpt|(?:.*-)?\w+=.*")

# Classes that prove a root without committed checkpoints.
_OURS = (EntryClass.STAGING, EntryClass.ABANDONED)


@dataclass(frozen=True)
class Prepared:
    """A plan, and where its entries were found.

    Attributes:
        found: every entry of the plan by name.
        roots: each run's root, by group.
    """

    plan: RetentionPlan
    found: Mapping[str, ScannedEntry]
    roots: Mapping[str, Root]


def prepare(
    place: Place,
    formats: Sequence[Format],
    policy: Policy,
    now: float,
    *,
    bases: Bases = recorded_bases,
    sizes: bool = False,
    known: RetentionPlan | None = None,
    most_files: int | None = None,
    runs: Sequence[Run] | None = None,
    weigh: Weigh | None = None,
    check: Check | None = None,
    counter: Counter = NULL,
) -> Prepared:
    """Read a root, or a directory of several, and plan what to keep; writes nothing.

    Args:
        place: the root or directory.
        formats: in the order in which they are tried.
        policy: what to keep.
        now: seconds since the epoch.
        bases: returns a checkpoint's bases (see `ScanOptions`); default: those that its format
            records. `no_bases` lets the bases of kept deltas go.
        sizes: list the files of all entries, not only of dropped and checked ones.
        known: an earlier plan; entries that it checked are opened again only if they changed.
        most_files: if dropped entries have more files, do not list them: the plan then omits sizes
            and cannot be carried out.
        runs: the runs as read at `now` without a policy; None to read them.
        weigh: returns the bytes that the weights of an entry would take, or raises why it cannot be
            thinned; None: nobody is asked, and every old milestone is to be thinned.
        check: reads the content of an entry and returns it with the verdict: called for survivors,
            the newest first, until one has passed. None: nothing is read, and the notes say what
            would be.
        counter: counts entries.

    Raises:
        NotFoundError: no format knows any entry.
        UnavailableError, DeniedError: something could not be read; nothing is planned then.
    """
    how = ScanOptions(formats, now, policy.metric, bases)
    if runs is None:
        roots = open_runs(place, formats)
        runs = [Run(root, read_entries(root, how, counter=counter)) for root in roots]
    else:
        judge = partial(judged_by, how=how)
        runs = [Run(r.root, concurrently(place.store, judge, r.members)) for r in runs]
    work = _Work(place, runs, policy, now, counter)
    if known is not None:
        work.recall(known)
    plan = work.settle()
    if check is not None and policy.check:
        plan = work.prove(check)
    if policy.thins:
        plan = work.weigh(weigh)
    # List files first: the freed bytes decide where `--free` stops.
    work.survey([d.entry.name for d in plan.decisions if sizes or not d.keep], most_files)
    plan = work.decide(policy)
    if policy.check:
        plan = work.with_proof(plan, asked=check is not None)
    return Prepared(plan, work.found, {r.base: r for r in work.roots})


def remember(prepared: Prepared) -> None:
    """Record in each root which checkpoints passed, so the next plan need not open them.

    Raises:
        NoResourceError, DeniedError, UnavailableError: it could not be written; the plan is valid.
    """
    for group, root in prepared.roots.items():
        write_passed(root, (f for f in prepared.found.values() if f.entry.group == group))


class _Work:
    """The state between two decisions."""

    def __init__(
        self, place: Place, runs: Sequence[Run], policy: Policy, now: float, counter: Counter
    ) -> None:
        self.place = place
        self.roots = [run.root for run in runs]
        self.policy = policy
        self.now = now
        self.counter = counter
        self.found: dict[str, ScannedEntry] = {}
        self.notes: list[str] = []
        self.last_run: dict[str, float] = {}
        self.passed: dict[str, Passed] = {}
        self.verified: dict[str, bool] = {}
        self.weighed: dict[str, RootEntry] = {}
        self.best: dict[str, tuple[str, ...]] = {}
        self.named: list[tuple[Root, str, tuple[str, ...]]] | None = None
        for run in runs:
            self._take(run)
        if not any(f.child or f.entry.entry_class in _OURS for f in self.found.values()):
            raise nothing_known(self.roots[0])

    def _take(self, run: Run) -> None:
        root = run.root
        self.found |= {f.entry.name: f for f in run.members}
        for name, passed in read_passed(root).items():
            self.passed[join(root.base, name)] = passed
        time = log.last_applied(root)
        if time is not None:
            self.last_run[root.base] = time
        self.notes += [
            f"{root.store.describe(root.base)}: {p.name} says {p.says!r}, which is not there"
            for p in root.pointers
            if p.dangling
        ]
        self.notes += upload_notes(root, self.now)
        self.notes += dead_plan_notes(root, self.now)
        self.notes += [
            f"{root.store.describe(f.place.path)} holds {listed(f.left)}, left by a write of ftckpt"
            " that was killed: the next seal of it removes what is a day old"
            for f in run.members
            if f.left
        ]

    def recall(self, plan: RetentionPlan) -> None:
        """Reuse the checks of an earlier plan."""
        for entry in (d.entry for d in plan.decisions):
            if entry.checked and entry.contents is not None:
                self.passed[entry.name] = Passed(
                    entry.contents.fingerprint, entry.step, entry.thinned
                )
                self.weighed[entry.name] = entry

    def decide(self, policy: Policy) -> RetentionPlan:
        """Decide with the present knowledge."""
        return decide(
            [f.entry for f in self.found.values()],
            policy,
            self.now,
            url=self.place.url,
            last_run=self.last_run,
            notes=self.notes,
        )

    def settle(self) -> RetentionPlan:
        """Decide, check what would be kept, and repeat until all that is kept was checked.

        A choice does not depend on entries that it did not choose, so the result is that of
        checking everything; damage in dropped entries does not matter.
        """
        policy = replace(self.policy, reclaim=None)
        by_content: set[str] = set()
        while True:
            self._find_verified()
            plan = self.decide(policy)
            waiting = [d.entry.name for d in plan.decisions if self._is_asked(d) and _unchecked(d)]
            if not waiting and not self._hold_best():
                return plan
            before = {name: self.found[name].entry.step for name in waiting}
            self._check(waiting)
            groups = {
                self.found[name].entry.group
                for name, step in before.items()
                if step is not None and name in self.found and self.found[name].entry.step != step
            }
            # A wrong step in one name says nothing about the others.
            for group in groups - by_content:
                self._read_steps(group)
            by_content |= groups

    def _is_asked(self, decision: Decision) -> bool:
        """Whether a rule counts on an entry; where one is named, all others stay unlooked at."""
        if self.policy.only:
            named = decision.entry.name in self.policy.only
            return named or any(reason.rule.startswith("keep-") for reason in decision.reasons)
        return bool(self.policy.rules)

    def prove(self, check: Check) -> RetentionPlan:
        """Read survivors, the newest first, until one has passed; one that is bad is none."""
        asked: set[str] = set()
        while True:
            plan = self.settle()
            waiting = []
            for left in self._unproven(plan):
                waiting += [e.name for e in left if e.name not in asked][:1]
            if not waiting:
                return plan
            asked.update(waiting)
            for name in waiting:  # one after the other: each is read by many threads
                self.found[name] = check(self.found[name])

    def with_proof(self, plan: RetentionPlan, *, asked: bool) -> RetentionPlan:
        """Return a plan with what is to be known of the content of its survivors."""
        found = self._unproven(plan)
        if asked:
            floors = tuple(unproven_floor(left) for left in found)
            return replace(plan, broken=(*plan.broken, *floors))
        notes = tuple(_to_read(left[0]) for left in found if left)
        return replace(plan, notes=(*plan.notes, *notes))

    def _unproven(self, plan: RetentionPlan) -> list[list[RootEntry]]:
        groups: dict[str, list[RootEntry]] = defaultdict(list)
        for found in self.found.values():
            groups[found.entry.group].append(found.entry)
        runs = {group: group_entries(members, self.now) for group, members in groups.items()}
        return unproven(runs, [d.entry for d in plan.drop])

    def weigh(self, ask: Weigh | None) -> RetentionPlan:
        """Find out what can be thinned; in the place of what cannot, the next may be."""
        policy = replace(self.policy, reclaim=None)
        asked: set[str] = set()
        while True:
            plan = self.decide(policy)
            waiting = [d.entry.name for d in plan.thin if d.entry.name not in asked]
            if not waiting:
                return plan
            asked.update(waiting)
            self._each(waiting, lambda found: self._weighed(found, ask), "weighing")

    def _weighed(self, found: ScannedEntry, ask: Weigh | None) -> ScannedEntry:
        known, contents = self.weighed.get(found.entry.name), found.entry.contents
        if known is not None and known.contents is not None and contents is not None:
            same = known.contents.fingerprint == contents.fingerprint
            if same and (known.weights is not None or known.whole):
                return found.now(weights=known.weights, whole=known.whole)
        if ask is None:
            return found
        try:
            return found.now(weights=ask(found))
        except _NO_ANSWER:
            raise
        except FtckptError as error:
            return found.now(whole=error.message)

    def _find_verified(self) -> None:
        """Mark the newest kept checkpoint that was sealed after a content check.

        Repeated after each check: a damaged one does not count, the one before it does.
        """
        groups: dict[str, list[RootEntry]] = defaultdict(list)
        for found in self.found.values():
            groups[found.entry.group].append(found.entry)
        for entries in groups.values():
            for stretch in group_entries(entries, self.now, self.policy).stretches:
                for order in newest_first(stretch):
                    sealed = (self.found[entry.name] for entry in order)
                    first = first_verified(sealed, self.verified)
                    if first is not None:
                        self.found[first.entry.name] = first.now(verified=True)

    def _hold_best(self) -> bool:
        """Hold what the newest saves name as the best so far, and what texts in the root name.

        Returns:
            whether one was not held before.
        """
        groups: dict[str, list[RootEntry]] = defaultdict(list)
        for found in self.found.values():
            groups[found.entry.group].append(found.entry)
        states = [
            (root, path)
            for root in self.roots
            for path in (
                *(join(root.base, n) for n in root.foreign if n == _STATE),
                *(join(root.base, p.name) for p in root.pointers if p.name == SNAPSHOT),
                *self._newest(groups[root.base]),
            )
        ]
        asked = [(root, path) for root, path in states if path not in self.best]
        said = concurrently(self.place.store, lambda one: self._told(*one), asked)
        self.best |= zip((path for _, path in asked), said, strict=True)
        if self.named is None:
            self.named = self._named_in_texts()
        self.best |= {path: names for _, path, names in self.named}
        states += [(root, path) for root, path, _ in self.named]
        news = False
        for root, path in states:
            pointer = relative(root.base, path)
            for best in self.best[path]:
                target = self.found.get(join(root.base, best))
                if target is None or target.entry.name == path:
                    continue
                if pointer not in target.entry.pointers:
                    pointers = (*target.entry.pointers, pointer)
                    self.found[target.entry.name] = target.now(pointers=pointers)
                    news = True
        return news

    def _named_in_texts(self) -> list[tuple[Root, str, tuple[str, ...]]]:
        """Return the texts of the roots that name an entry of theirs, with the names."""
        return [
            (root, join(root.base, text), names)
            for root in self.roots
            for text, names in root.named_in_texts({c.path for c in root.candidates}).items()
        ]

    def _told(self, root: Root, path: str) -> tuple[str, ...]:
        """Return the names that the file of a trainer or the newest save names."""
        folder, _, name = path.rpartition("/")
        if name == _STATE:
            return best_of(root, folder)
        if name == SNAPSHOT:
            try:
                return tuple(named_in_snapshot(root.store, root.store.stat(path)))
            except NotFoundError:  # it is being written anew
                return ()
        child = self.found[path].child
        return () if child is None else best_in(root, child.part)

    def _newest(self, entries: Sequence[RootEntry]) -> Iterator[str]:
        """Yield what may say which is the best: the newest saves, and those with a name for it."""
        named = [e.name for e in entries if e.named]
        for stretch in group_entries(entries, self.now, self.policy).stretches:
            named += (order[0].name for order in newest_first(stretch) if order)
        for name in dict.fromkeys(named):
            own = name.rpartition("/")[2]
            if _TRAINERS.fullmatch(own):
                yield join(name, _STATE)
            elif _LIGHTNING.fullmatch(own):
                yield name

    def survey(self, names: Sequence[str], most_files: int | None) -> None:
        """List the files of entries, unless there are more than `most_files`."""
        waiting = [n for n in names if self.found[n].entry.contents is None]
        if most_files is not None and self._have_more(waiting, most_files):
            self.notes.append(
                f"more than {most_files:,} files of what goes were not listed, so that it is not "
                "known what they free: with --json or --apply they are"
            )
            return
        self._each(waiting, surveyed, "listing")

    def _have_more(self, names: Sequence[str], most: int) -> bool:
        """Whether entries have more files than `most`; stops counting there."""
        if sum(self.found[name].names for name in names) > most:
            return True
        counted = 0
        for name in names:
            found = self.found[name]
            counted += count_names(found.root.store, found.place)
            if counted > most:
                return True
        return False

    def _check(self, names: Sequence[str]) -> None:
        def one(found: ScannedEntry) -> ScannedEntry | None:
            return checked(found, self.now, self.passed.get(found.entry.name))

        self._each(names, one, "checking")

    def _read_steps(self, group: str) -> None:
        members = [
            f
            for f in self.found.values()
            if f.entry.group == group and f.entry.entry_class is EntryClass.COMMITTED
        ]

        def one(found: ScannedEntry) -> ScannedEntry:
            step = step_by_content(found)
            known = found.now(looked=ScanDepth.HEADERS)
            return known if step is None else known.now(step=step)

        self._each([f.entry.name for f in members if not f.entry.checked], one, "steps")

    def _each(self, names: Sequence[str], do: _Look, what: str) -> None:
        self.counter.start(what, len(names), "entries")

        def one(name: str) -> ScannedEntry | None:
            found = do(self.found[name])
            self.counter.add(1)
            return found

        store = self.place.store
        for name, found in zip(names, concurrently(store, one, names), strict=True):
            if found is None:
                del self.found[name]
            else:
                self.found[name] = found


def _to_read(newest: RootEntry) -> str:
    size = "" if newest.contents is None else f" ({newest.contents.nbytes:,} bytes)"
    return (
        f"no survivor has passed a check of its content: --apply first reads {newest.name}{size}, "
        "and the one before it if that is bad; --no-check reads nothing"
    )


def _unchecked(decision: Decision) -> bool:
    entry = decision.entry
    return decision.keep and entry.entry_class is EntryClass.COMMITTED and not entry.checked
