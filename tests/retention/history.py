"""A training run as its root shows it: saves, crashes, restarts, pins, deltas, clocks that jump."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from ftckpt.retention.policy import DeleteLimit, Metric, Policy
from ftckpt.retention.scan.entries import EntryClass, Lease, Pin, RootEntry
from tests.retention.oracle import Asked, Thing

START = 1_700_000_000.0


class History:
    """One run of random events; `entries` is what lies in its root at each moment.

    Args:
        choose: where chance comes from.
        group: of the entries.
    """

    def __init__(self, choose: Random, group: str = "") -> None:
        self.choose = choose
        self.group = group
        self.now = START
        self.step = choose.choice((0, 0, 1, 90))
        self.every = choose.choice((7, 10, 33, 250))
        self.by_name: dict[str, RootEntry] = {}

    @property
    def entries(self) -> list[RootEntry]:
        """What lies there, with the leases that have not ended."""
        return [
            replace(e, leases=tuple(x for x in e.leases if x.expires > self.now))
            for e in self.by_name.values()
        ]

    def committed(self) -> list[RootEntry]:
        """The finished saves."""
        return [e for e in self.by_name.values() if e.entry_class is EntryClass.COMMITTED]

    def advance(self, events: int) -> None:
        """Let so many things happen."""
        kinds = self.choose.choices(list(_EVENTS), list(_EVENTS.values()), k=events)
        for kind in kinds:
            getattr(self, kind)()

    def save(self) -> None:
        """Save, perhaps as a delta, perhaps over what an earlier attempt left."""
        self.step += self.every
        self.now += self.choose.choice((60, 900, 1320, 7000, 40_000))
        known = self.committed()
        base = self.choose.choice(known).name if known and self.choose.random() < 0.2 else None
        metric = self.choose.choice((None, None, round(self.choose.uniform(0, 3), 1)))
        self._put(
            self._name(),
            EntryClass.COMMITTED,
            self.step,
            self.now if self.choose.random() < 0.97 else None,
            checked=True,
            verified=self.choose.random() < 0.2,
            bases=() if base in (None, self._name()) else (base,),
            metric=metric,
            tags=tuple(t for t in ("milestone", "other") if self.choose.random() < 0.08),
        )

    def twin(self) -> None:
        """Save a step once more under another name: by another hook, or after a restart."""
        for entry in self.choose.sample(self.committed(), min(1, len(self.committed()))):
            self.now += 60
            self._put(
                f"{self.group}checkpoint-{entry.step}",
                EntryClass.COMMITTED,
                entry.step,
                self.now,
                checked=True,
                verified=self.choose.random() < 0.2,
                metric=self.choose.choice((None, entry.metric)),
            )

    def crash(self) -> None:
        """Die while saving."""
        self.step += self.every
        self.now += 600
        known = self.committed()
        bases = (self.choose.choice(known).name,) if known and self.choose.random() < 0.3 else ()
        self._put(
            self._name() + ".tmp", EntryClass.STAGING, self.step, self.now, bases=bases, why="tmp"
        )
        self.step -= self.every

    def restart(self) -> None:
        """Go back to an earlier step; what was saved since stays."""
        known = [e.step for e in self.committed() if e.step is not None and e.step < 10**6]
        if known:
            self.step = self.choose.choice(known)
            self.now += 1800

    def pause(self) -> None:
        """Wait in a queue; a save that is silent for a day is abandoned."""
        self.now += self.choose.choice((3600, 100_000, 700_000))
        self._age()

    def jump(self) -> None:
        """Write with a clock that is wrong, or a counter that is."""
        name = f"{self.group}step-{self.step + 1}"
        self._put(
            name,
            EntryClass.COMMITTED,
            self.choose.choice((self.step + 1, self.step + 1, 10**9, 10**9 + 7)),
            self.now + self.choose.choice((-1e9, -3600, 60, 3600, 86400)),
            checked=True,
        )

    def damage(self) -> None:
        """Find damage in a checkpoint."""
        self._change(entry_class=EntryClass.CORRUPT, checked=False, why="damaged")

    def pin(self) -> None:
        """Somebody wants one kept."""
        for name in self._any():
            self.by_name[name] = replace(
                self.by_name[name], pins=(Pin(name, "alice", "why not", self.now),)
            )

    def unpin(self) -> None:
        """Nobody wants one any more."""
        self._change(pins=())

    def read(self) -> None:
        """A reader takes a lease."""
        for name in self._any():
            lease = Lease(name, "node7", self.now + 1800)
            self.by_name[name] = replace(self.by_name[name], leases=(lease,))

    def point(self) -> None:
        """Write the pointer; it means one checkpoint."""
        for name in self._any():
            for other, entry in self.by_name.items():
                pointers = ("latest",) if other == name else ()
                self.by_name[other] = replace(entry, pointers=pointers)

    def stranger(self) -> None:
        """Somebody puts something else there."""
        kind = self.choose.choice((EntryClass.FOREIGN, EntryClass.TRASH, EntryClass.COMMITTED))
        step = None if self.choose.random() < 0.5 else self.step
        name = f"{self.group}{'odd' if step is None else 'best'}-{len(self.by_name)}"
        self._put(name, kind, step, self.now, checked=True, named=step is not None)

    def copy(self) -> None:
        """A person copies one, or puts one aside: damaged, unfinished, or sound."""
        stepped = [e for e in self.committed() if e.step is not None]
        for entry in self.choose.sample(stepped, min(1, len(stepped))):
            name = self.choose.choice(("paper-{}", "step-{} (copy)", "step-{}.bad", "old-step-{}"))
            kinds = (EntryClass.COMMITTED, EntryClass.CORRUPT, EntryClass.ABANDONED)
            kind = self.choose.choice(kinds)
            self._put(
                self.group + name.format(entry.step), kind, entry.step, self.now,
                checked=kind is EntryClass.COMMITTED, why="copied",
            )  # fmt: skip

    def drop(self, names: set[str]) -> None:
        """Carry a plan out."""
        for name in names:
            del self.by_name[name]

    def _name(self) -> str:
        return f"{self.group}step-{self.step}"

    def _put(
        self, name: str, kind: EntryClass, step: int | None, time: float | None, **more: object
    ) -> None:
        entry = RootEntry(name, self.group, kind, step, time, **more)  # type: ignore[arg-type]
        self.by_name[name] = entry

    def _any(self) -> list[str]:
        return [self.choose.choice(list(self.by_name))] if self.by_name else []

    def _change(self, **values: object) -> None:
        for name in self._any():
            if self.by_name[name].entry_class is EntryClass.COMMITTED:
                self.by_name[name] = replace(self.by_name[name], **values)  # type: ignore[arg-type]

    def _age(self) -> None:
        for name, entry in self.by_name.items():
            if entry.entry_class is EntryClass.STAGING and self.now - (entry.time or 0) >= 86400:
                self.by_name[name] = replace(entry, entry_class=EntryClass.ABANDONED)


_EVENTS = {
    "save": 20, "twin": 1, "crash": 2, "restart": 1, "pause": 2, "jump": 0.5, "damage": 1, "pin": 1,
    "unpin": 1, "read": 1, "point": 1, "stranger": 0.5,
    "copy": 1,
}  # fmt: skip


def any_policy(choose: Random) -> Policy:
    """Return a policy of one to three rules, most with the usual floors."""
    values: dict[str, object] = {}
    for rule in choose.sample(sorted(_RULES), choose.choice((1, 1, 2, 3))):
        values |= _RULES[rule](choose)
    if choose.random() < 0.3:
        values["min_survivors"] = choose.choice((1, 3))
    if choose.random() < 0.3:
        values["max_delete"] = choose.choice((DeleteLimit(2), DeleteLimit(30, percent=True)))
    values["delete_corrupt"] = choose.random() < 0.1
    return Policy(**values)  # type: ignore[arg-type]


def one_more_rule(choose: Random, policy: Policy) -> Policy:
    """Return a policy with a rule more than this one has."""
    free = [r for r in sorted(_RULES) if getattr(policy, r) in (None, ())]
    return replace(policy, **_RULES[choose.choice(free)](choose)) if free else policy  # type: ignore[arg-type]


def thing_of(entry: RootEntry) -> Thing:
    """Return an entry as the oracle takes it."""
    own, whole = entry.name.rpartition("/")[2], entry.entry_class is EntryClass.COMMITTED
    return Thing(
        name=entry.name,
        run=entry.group,
        kind=str(entry.entry_class),
        step=entry.step,
        time=entry.time,
        verified=entry.verified,
        named=entry.named,
        pointed=bool(entry.pointers),
        pinned=bool(entry.pins),
        leased=bool(entry.leases),
        tags=frozenset(entry.tags),
        upon=entry.bases,
        metric=entry.metric,
        checked=entry.checked,
        copied=own.startswith(("paper", "odd") if whole else ("paper", "odd", "best"))
        or own.endswith("(copy)"),
        aside=own.endswith(".bad") or own.startswith("old-step"),
    )


def asked_by(policy: Policy) -> Asked:
    """Return a policy as the oracle takes it."""
    units = ("hourly", "daily", "weekly", "monthly")
    numbers = {unit: getattr(policy, f"keep_{unit}") for unit in units}
    limit = policy.max_delete
    return Asked(
        last=policy.keep_last,
        every=policy.keep_every,
        periods={unit: number for unit, number in numbers.items() if number is not None},
        within=policy.keep_within,
        best=policy.keep_best,
        largest=policy.metric is not None and policy.metric.largest,
        tags=frozenset(policy.keep_tags),
        delete_corrupt=policy.delete_corrupt,
        min_survivors=policy.min_survivors,
        max_delete=None if limit is None else limit.amount,
        percent=limit is not None and limit.percent,
    )


_RULES: dict[str, Callable[[Random], dict[str, object]]] = {
    "keep_last": lambda c: {"keep_last": c.choice((1, 2, 3, 5))},
    "keep_every": lambda c: {"keep_every": c.choice((1, 20, 33, 100, 1000))},
    "keep_hourly": lambda c: {"keep_hourly": c.choice((1, 3, 24))},
    "keep_daily": lambda c: {"keep_daily": c.choice((1, 2, 7))},
    "keep_weekly": lambda c: {"keep_weekly": c.choice((1, 2))},
    "keep_monthly": lambda c: {"keep_monthly": c.choice((1, 2))},
    "keep_within": lambda c: {"keep_within": c.choice((0.0, 3600.0, 200_000.0))},
    "keep_best": lambda c: {
        "keep_best": c.choice((1, 2)),
        "metric": Metric("loss", largest=c.random() < 0.5),
    },
    "keep_tags": lambda c: {"keep_tags": ("milestone",)},
}
