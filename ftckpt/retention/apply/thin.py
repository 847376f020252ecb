"""Thin the milestones of a plan: their weights stay, and the whole ones go to the trash.

The weights are written to `NAME.ftckpt-weights` and proven first. Discovery passes over them while
`NAME` stands (`ftckpt.discovery.roots.Root.whole`), so the one act that takes `NAME` out of the
root makes them visible: a reader finds the whole checkpoint of the step or its weights, never none
and never both. Killed before that act, the next run finds the weights and goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ftckpt.discovery.recognise import Format
from ftckpt.discovery.resolve import Place
from ftckpt.discovery.roots import Root, read_again
from ftckpt.errors import ExitCode, FtckptError, NotFoundError, RefusedError, error_of
from ftckpt.findings import Finding, Severity, counted
from ftckpt.manifest import Manifest, ThinnedFrom
from ftckpt.manifest.locate import thinned_manifest
from ftckpt.own_files import WEIGHTS
from ftckpt.progress import NULL, Counter
from ftckpt.retention.document import plan_id
from ftckpt.retention.locks.hold import hold, require_clock
from ftckpt.retention.locks.remote import leased
from ftckpt.retention.policy.plan import Decision, Reason, RetentionPlan
from ftckpt.retention.policy.protections import group_entries
from ftckpt.retention.records import log
from ftckpt.retention.scan.entries import EntryClass
from ftckpt.retention.scan.entry import (
    Bases,
    ScannedEntry,
    ScanOptions,
    fingerprint_of,
    identity_of,
    list_entry,
    recorded_bases,
)
from ftckpt.retention.scan.staleness import is_same
from ftckpt.retention.trash import Trash
from ftckpt.storage.source import Source
from ftckpt.storage.store import relative
from ftckpt.verification.blocks import check_manifest, compare_listing
from ftckpt.verification.evidence import Report
from ftckpt.workers import ALONE, Work

from .outcome import Thinned, ThinnedEntry
from .prepare import Prepared, prepare
from .run import Dropping

TakeWeights = Callable[[ScannedEntry, str, ThinnedFrom], int]
"""Checks all of an entry, writes its weights to a path of its store, proves them; returns bytes."""

Differ = Callable[[ScannedEntry, str], str]
"""Compares weights at a path of an entry's store with those of the entry; says what differs."""


def thin(
    plan: RetentionPlan,
    place: Place,
    formats: Sequence[Format],
    take_weights: TakeWeights,
    *,
    actor: str,
    now: Callable[[], float],
    purge_now: bool = False,
    bases: Bases = recorded_bases,
    differ: Differ = lambda _, __: "",
    counter: Counter = NULL,
    work: Work = ALONE,
) -> Thinned:
    """Thin a plan's milestones, the oldest first; one that cannot be thinned stays whole.

    Nothing is locked while weights are written, which can take hours; each is claimed by a lease.

    Args:
        plan: from `prepare` or `document.load_plan`.
        place: the place of the plan.
        formats: in the order in which they are tried.
        take_weights: see `TakeWeights`.
        actor: for the log.
        now: returns seconds since the epoch.
        purge_now: free the whole ones at once instead of moving them to the trash.
        bases: returns a checkpoint's bases (see `ScanOptions`).
        differ: compares weights that an earlier run has left (see `Differ`).
        counter: counts entries.
        work: how weights that an earlier run has left are read again.

    Raises:
        UnavailableError, DeniedError: the root could not be read; nothing was touched.
    """
    if not plan.thin:
        return Thinned()
    policy = replace(plan.policy, reclaim=None)
    fresh = prepare(place, formats, policy, now(), bases=bases, known=plan, counter=counter)
    how = ScanOptions(formats, now(), policy.metric, bases, needs=True)
    run = _Thinning(plan, fresh, take_weights, differ, how, actor, now, work, purge_now=purge_now)
    counter.start("thinning", len(plan.thin), "entries")
    for decision in plan.thin:
        run.thin(decision)
        counter.add(1)
    return Thinned(
        thinned=tuple(run.thinned),
        trashed=tuple(one for done in run.droppings for one in done.trashed),
        absent=tuple(run.absent),
        freed=sum(done.freed for done in run.droppings),
        waiting=sum(done.waiting for done in run.droppings),
        failed=run.failed,
        notes=tuple(run.notes),
    )


class _Weights(NamedTuple):
    """Weights of which a manifest says that they are finished."""

    source: Source
    manifest: Manifest


_PURGE = "once the trash is freed (gc purge), they are made anew"

# Of the weights of an entry that stands whole.
_PENDING = (EntryClass.STAGING, EntryClass.ABANDONED)


class _Thinning:
    """Thins entries one by one."""

    def __init__(
        self,
        plan: RetentionPlan,
        fresh: Prepared,
        take_weights: TakeWeights,
        differ: Differ,
        how: ScanOptions,
        actor: str,
        now: Callable[[], float],
        work: Work,
        *,
        purge_now: bool,
    ) -> None:
        self.plan = plan
        self.identity = plan_id(plan)
        self.fresh = fresh
        self.now_decided = {d.entry.name: d for d in fresh.plan.decisions}
        self.take_weights = take_weights
        self.differ = differ
        self.how = how
        self.actor = actor
        self.now = now
        self.work = work
        self.purge_now = purge_now
        self.thinned: list[ThinnedEntry] = []
        self.droppings: list[Dropping] = []
        self.absent: list[str] = []
        self.failed: dict[str, FtckptError] = {}
        self.notes: list[str] = []

    def thin(self, decision: Decision) -> None:
        """Thin one entry, or record why it stays whole."""
        name = decision.entry.name
        try:
            self._thin(decision)
        except NotFoundError:
            self.absent.append(name)
        except FtckptError as error:
            self.failed[name] = error

    def _thin(self, decision: Decision) -> None:
        name = decision.entry.name
        found = self.fresh.found.get(name)
        if found is None:
            raise NotFoundError(f"{name} is gone")
        current = self.now_decided[name]
        if not is_same(decision, found.entry):
            raise RefusedError(f"{name} stays whole: it has changed since the plan was made")
        if not current.thin:
            why = current.reasons[0] if current.reasons else "the plan is stale"
            raise RefusedError(f"{name} stays whole now ({why})", hint="make a new plan")
        contents, step = found.entry.contents, found.entry.step
        assert contents is not None
        assert step is not None
        files = list_entry(found.root.store, found.place)
        if fingerprint_of(files) != contents.fingerprint:
            raise RefusedError(f"{name} stays whole: it is changing")
        record = ThinnedFrom(
            name=relative(found.root.base, found.place.path),
            step=step,
            format=found.entry.format,
            saved=found.entry.time,
            files=contents.files,
            nbytes=contents.nbytes,
            fingerprint=identity_of(files, found.place.path),
            left=(),
            metrics=_metrics(self.plan, found),
        )
        nbytes = self._made(found, record)
        if nbytes is None:
            with leased(found.root, record.name, f"{self.actor} (gc thins it)", self.now):
                nbytes = self.take_weights(found, found.place.path + WEIGHTS, record)
        with hold([found.root], self.actor, self.now()) as trashes:
            require_clock([found.root], self.now())
            self._require_survivors(found)
            _require_shown(read_again(found.root), record.name)
            weights = self._finished(found)
            if weights is None or not _is_of(weights, record) or _listed_damage(weights):
                raise RefusedError(f"{name} stays whole: its weights are not there any more")
            self._swap(decision, found, trashes, nbytes)

    def _made(self, found: ScannedEntry, record: ThinnedFrom) -> int | None:
        """Return the bytes of weights that a killed run has made; drop damaged ones.

        Those of another save are dropped, too. The manifest alone proves nothing: the files may
        have been damaged since, or be somebody else's, and the whole one is about to go.
        """
        name, weights = found.entry.name, self._finished(found)
        if weights is None:
            return None  # a transfer that was killed goes on where it was
        _require_shown(found.root, record.name)
        damage = ""
        if _is_of(weights, record):
            with leased(found.root, record.name, f"{self.actor} (gc thins it)", self.now):
                damage = self._damage(weights) or self.differ(found, found.place.path + WEIGHTS)
            if not damage:
                return weights.source.nbytes
            why, told = f"its weights are damaged: {damage}", f"is damaged ({damage})"
        else:
            why = f"its weights are not those of {name} as it is now"
            told = "held weights of another save"
        other = self.fresh.found.get(name + WEIGHTS)
        # Without its data no format knows it any more, and its manifest still says whose it is.
        if other is None or not (damage or other.entry.entry_class in _PENDING):
            raise RefusedError(f"{name} stays whole: {why}")
        with hold([found.root], self.actor, self.now()) as trashes:
            trashes[found.entry.group].discard(
                other.now(contents=None),
                Decision(other.entry, False, (Reason("thin", why),)),
                actor=self.actor,
                now=self.now(),
            )
        self.notes.append(f"{other.entry.name} {told}: it is in the trash")
        if not found.root.store.traits.local:
            # There the trash keeps the data in place: new weights would lie in the trash, too.
            raise RefusedError(f"{name} stays whole: {why}", hint=_PURGE)
        return None

    def _damage(self, weights: _Weights) -> str:
        """Read weights again; return what is damaged, "" if nothing is.

        Raises:
            FtckptError: they could not be read, which says nothing about them.
        """
        errors: list[Finding] = []
        source, manifest = weights.source, weights.manifest
        work = replace(self.work, counter=NULL)
        check_manifest(source, manifest, emit=_errors_into(errors), work=work)
        if not errors:
            return ""
        if any(one.code is not ExitCode.CORRUPT for one in errors):
            other = next(one for one in errors if one.code is not ExitCode.CORRUPT)
            raise error_of(other.code, f"{source.name} could not be checked: {other.message}")
        return errors[0].message

    def _finished(self, found: ScannedEntry) -> _Weights | None:
        """Return the finished weights beside an entry."""
        try:
            source = Source.directory(found.root.store, found.place.path + WEIGHTS)
        except NotFoundError:
            return None
        manifest = thinned_manifest(source)
        return None if manifest is None else _Weights(source, manifest)

    def _require_survivors(self, found: ScannedEntry) -> None:
        """Count the good checkpoints that are whole once more: others may have gone meanwhile."""
        root, group = found.root, found.entry.group
        skip = len(group) + 1 if group else 0
        names = set(root.store.names(root.base))
        gone = {one.decision.entry.name for one in self.thinned}
        members = [f.entry for f in self.fresh.found.values() if f.entry.group == group]
        for stretch in group_entries(members, self.now(), self.plan.policy).stretches:
            if not any(entry.name == found.entry.name for entry in stretch):
                continue
            good = sum(
                e.checked and not e.thinned and e.name not in gone and e.name[skip:] in names
                for e in stretch
                if e.name != found.entry.name
            )
            if good < self.plan.policy.min_survivors:
                left = counted(good, "good checkpoint")
                raise RefusedError(
                    f"{found.entry.name} stays whole: {left} would be left to go on from"
                )

    def _dropping(self, trashes: Mapping[str, Trash]) -> Dropping:
        return Dropping(
            self.plan, self.fresh.found, trashes, self.how, self.actor, self.now,
            purge_now=self.purge_now, thins=True,
        )  # fmt: skip

    def _swap(
        self, decision: Decision, found: ScannedEntry, trashes: Mapping[str, Trash], nbytes: int
    ) -> None:
        """Take the whole one out of the root, which shows its weights."""
        name, contents = decision.entry.name, found.entry.contents
        assert contents is not None
        whole = decision._replace(frees=contents.unshared)
        reasons = [str(reason) for reason in decision.reasons]
        told: Mapping[str, object] = {
            "plan": self.identity, "actor": self.actor, "drop": {name: reasons}, "keep": {},
            "thin": {name: name + WEIGHTS},
        }  # fmt: skip
        log.append_if_room(found.root, log.APPLYING, self.now(), told)
        dropping = self._dropping(trashes)
        self.droppings.append(dropping)
        dropping.drop(whole)
        done = bool(dropping.dropped)
        if not dropping.absent and not done:
            raise dropping.failed[name]
        if not done:
            raise NotFoundError(f"{name} is gone")
        won = max(0, contents.unshared - nbytes)
        self.thinned.append(ThinnedEntry(decision, name + WEIGHTS, nbytes, won))
        self._tell(found.root, dropping, name)
        if dropping.failed:
            self.failed |= dropping.failed

    def _tell(self, root: Root, dropping: Dropping, name: str) -> None:
        fields: Mapping[str, object] = {
            "plan": self.identity,
            "actor": self.actor,
            "dropped": [name],
            "thinned": {name: name + WEIGHTS},
            "trash": [t.id for t in dropping.trashed],
            "absent": [],
            "failed": {one: error.message for one, error in dropping.failed.items()},
        }
        if not log.append_if_room(root, log.APPLIED, self.now(), fields):
            self.notes.append(f"there was no room in the log of {root.url} for what was done")


def _require_shown(root: Root, name: str) -> None:
    """Refuse weights that lie in the trash of an object store, which keeps its data in place.

    They would not be shown without the whole one, and be deleted with the trash.
    """
    if name + WEIGHTS in root.tombs:
        raise RefusedError(f"{name} stays whole: weights of it are in the trash", hint=_PURGE)


def _is_of(weights: _Weights, record: ThinnedFrom) -> bool:
    """Whether weights are those of an entry as it is now, file by file."""
    known = weights.manifest.thinned
    assert known is not None
    return (known.name, known.fingerprint) == (record.name, record.fingerprint)


def _listed_damage(weights: _Weights) -> bool:
    """Whether a file is missing or of another size than the manifest says; reads none."""
    errors: list[Finding] = []
    report = Report(weights.source, _errors_into(errors))
    compare_listing(weights.source, weights.manifest, (), report)
    return bool(errors)


def _errors_into(errors: list[Finding]) -> Callable[[Finding], None]:
    def take(found: Finding) -> None:
        if found.severity is Severity.ERROR:
            errors.append(found)

    return take


def _metrics(plan: RetentionPlan, found: ScannedEntry) -> dict[str, float]:
    """Return the metric of the policy: the files that show it go with the rest."""
    metric, value = plan.policy.metric, found.entry.metric
    return {} if metric is None or value is None else {metric.name: value}
