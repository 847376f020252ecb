"""Random lives of a root: saves, crashes, pins, kills, clocks that jump, and what must hold always.

The invariants are those that a user would name: what is in use stays, what is left is as it was
saved, a plan drops what it shows and nothing else, and what was dropped comes back whole.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ftckpt.errors import ExitCode, RefusedError
from ftckpt.own_files import SUFFIX
from ftckpt.retention.apply.purge import trashed
from ftckpt.retention.locks import leases
from ftckpt.retention.locks.hold import SKEW
from ftckpt.retention.policy import Policy
from ftckpt.retention.policy.plan import RetentionPlan
from ftckpt.retention.records import log, pins
from tests.builders.small_format import read
from tests.retention.calls import Calls, Killed
from tests.retention.carrying import (
    DAY,
    FORMATS,
    HOUR,
    NOW,
    apply_to,
    names_in,
    place_of,
    plan_of,
    purge_in,
    save,
    snapshot,
    undelete_in,
)

POLICIES = (
    Policy(keep_last=2),
    Policy(keep_last=3, keep_every=5),
    Policy(keep_last=1, min_survivors=1),
    Policy(keep_within=3 * HOUR, keep_last=2),
)
CHANGES = st.integers(1, 40)


class Life(RuleBasedStateMachine):
    """One root, and a model of what lies in it and in its trash."""

    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="ftckpt-life-"))
        self.root = self.top / "root"
        self.outside = self.top / "outside"
        self.now = NOW
        self.step = 0
        self.live: dict[str, object] = {}
        self.saved: dict[str, object] = {}
        self.torn: set[str] = set()
        self.pinned: set[str] = set()
        self.upon: dict[str, str] = {}

    def teardown(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.top)

    @initialize()
    def begin(self) -> None:
        """Begin with four saves."""
        self.root.mkdir()
        self.outside.mkdir()
        (self.outside / "precious").write_text("precious")
        self.before_outside = snapshot(self.outside)
        for _ in range(4):
            self.save("directory", None)

    @rule(kind=st.sampled_from(["directory", "file", "link"]), base=st.none() | st.integers(0, 9))
    def save(self, kind: str, base: int | None) -> None:
        """Save, perhaps as a delta, perhaps with a link that leads out."""
        self.step += 1
        self.now += HOUR
        name = f"step-{self.step}" + (".pt" if kind == "file" else "")
        whole = sorted(n for n in self.live if not n.endswith(".pt"))
        upon = whole[base % len(whole)] if base is not None and whole and kind != "file" else ""
        save(self.root, name, 100, self.now, base=upon)
        if kind == "link":
            (self.root / name / "out").symlink_to(self.outside)
        if upon:
            self.upon[name] = upon
        self.live[name] = self.saved[name] = self.content(name)

    @rule()
    def crash(self) -> None:
        """Die while saving; what is left is never finished."""
        name = f"step-{self.step + 1}"
        if name not in self.torn:
            (self.root / f"{name}.tmp").mkdir()
            (self.root / f"{name}.tmp/data").write_text("half")
            os.utime(self.root / f"{name}.tmp/data", (self.now, self.now))
            self.torn.add(f"{name}.tmp")
            self.step += 1

    @rule(which=st.integers(0, 99))
    def pin(self, which: int) -> None:
        """Somebody wants one kept."""
        name = sorted(self.live)[which % len(self.live)]
        pins.pin(read(self.root), name, owner="alice", reason="why not", now=self.now)
        self.pinned.add(name)

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        """Nobody wants any kept any more."""
        for name in self.pinned:
            pins.unpin(read(self.root), name)
        self.pinned.clear()

    @rule(which=st.integers(0, 99))
    def point(self, which: int) -> None:
        """Write the pointer."""
        (self.root / "latest").write_text(sorted(self.live)[which % len(self.live)])

    @rule(which=st.integers(0, 99))
    def lease(self, which: int) -> None:
        """Somebody reads one for half an hour."""
        name = sorted(self.live)[which % len(self.live)]
        leases.take(read(self.root), name, holder="node7", now=self.now)

    @rule(hours=st.sampled_from([0.1, 5, 30, -0.01, -30]))
    def pass_time(self, hours: float) -> None:
        """Wait, or have the clock set."""
        self.now += hours * HOUR

    @rule(
        policy=st.sampled_from(POLICIES),
        killed=st.none() | CHANGES,
        at_once=st.booleans(),
        purging=st.booleans(),
    )
    def gc(self, policy: Policy, killed: int | None, at_once: bool, purging: bool) -> None:
        """Plan and carry out, perhaps killed on the way; then to the end."""
        plan = plan_of(self.root, policy, self.now)
        dead = self.trash()
        ttl = DAY if purging else None
        if killed is not None:
            try:
                with Calls(killed, None).failing():
                    self.carry(plan, at_once, ttl)
            except Killed:
                pass
            self.check_dropped(plan)
            plan = plan_of(self.root, policy, self.now)
        done = self.carry(plan, at_once, ttl)
        self.check_dropped(plan)
        if done:
            assert not plan_of(self.root, policy, self.now).drop
            if not at_once and not purging:
                assert set(self.trash()) >= set(dead)

    def carry(self, plan: RetentionPlan, at_once: bool, ttl: float | None) -> bool:
        """Carry a plan out, where neither floors nor the clock forbid it."""
        try:
            applied = apply_to(self.root, plan, self.now, purge_now=at_once, trash_ttl=ttl)
        except RefusedError:
            assert plan.broken or self.behind()
            return False
        assert applied.code is ExitCode.OK
        assert [d.entry.name for d in applied.dropped] == list(plan.order)
        return True

    @rule(killed=st.none() | CHANGES, hours=st.sampled_from([0, 1, 24]))
    def purge(self, killed: int | None, hours: int) -> None:
        """Reclaim what is due, perhaps killed on the way; then to the end."""
        due = {t for t in self.trash() if t[1] + hours * HOUR <= self.now and t[1] <= self.now}
        young = set(self.trash()) - due
        try:
            if killed is not None:
                with Calls(killed, None).failing():
                    purge_in(self.root, self.now, trash_ttl=hours * HOUR)
        except Killed:
            pass
        except RefusedError:
            assert self.behind()
        try:
            purged = purge_in(self.root, self.now, trash_ttl=hours * HOUR)
        except RefusedError:
            assert self.behind()
            return
        assert purged.code is ExitCode.OK
        held = {self.thing_at(path)[:2] for path in purged.held}
        assert {t[:2] for t in self.trash()} == {t[:2] for t in young} | held

    @precondition(lambda self: self.trash())
    @rule(which=st.integers(0, 99), killed=st.none() | CHANGES)
    def undelete(self, which: int, killed: int | None) -> None:
        """Have one back, perhaps killed on the way; then to the end."""
        name, _, whole = self.trash()[which % len(self.trash())]
        stands = (self.root / name).exists()
        try:
            if killed is not None:
                with Calls(killed, None).failing():
                    undelete_in(self.root, name, now=self.now)
        except Killed:
            pass
        found = undelete_in(self.root, name, now=self.now)
        if not whole or stands:
            assert found.code in (ExitCode.REFUSED, ExitCode.OK)
            return
        assert found.code is ExitCode.OK
        if name.endswith(".tmp"):
            self.torn.add(name)
        else:
            self.live[name] = self.saved[name]  # and the invariant looks whether it is

    @invariant()
    def what_is_left_is_as_it_was_saved(self) -> None:
        """Everything that has a name in the root is whole, and nothing has come or gone."""
        manifests = {n + SUFFIX for n in self.live if n.endswith(".pt")}
        assert names_in(self.root) - {"latest"} == {*self.live, *self.torn, *manifests}
        for name, content in self.live.items():
            assert self.content(name) == content

    @invariant()
    def nothing_outside_has_changed(self) -> None:
        """Links that lead out are never followed."""
        if self.outside.exists():
            assert snapshot(self.outside) == self.before_outside

    @invariant()
    def no_delta_is_without_its_base(self) -> None:
        """What a checkpoint is built on is there, or can be had back."""
        there = {*self.live, *(t[0] for t in self.trash())}
        assert all(self.upon[name] in there for name in self.live if name in self.upon)

    def check_dropped(self, plan: RetentionPlan) -> None:
        """What has gone was shown by the plan, and nobody had a claim on it."""
        now = names_in(self.root)
        gone = {name for name in {*self.live, *self.torn} if name not in now}
        assert gone <= set(plan.order)
        pointer = self.root / "latest"
        held = {*self.pinned, *([pointer.read_text()] if pointer.exists() else [])}
        held |= {lease.entry for lease in leases.live(read(self.root), self.now)}
        assert not gone & held
        survivors = len(self.live.keys() - gone)
        assert survivors >= min(plan.policy.min_survivors, len(self.live))
        assert max(self.live, key=self.step_of) not in gone
        for name in gone:
            self.live.pop(name, None)
            self.torn.discard(name)

    def content(self, name: str) -> object:
        """Return the bytes and times of a checkpoint, and of the manifest beside it."""
        path = self.root / name
        beside = self.root / (name + SUFFIX)
        return snapshot(path), snapshot(beside) if beside.exists() else None

    def trash(self) -> list[tuple[str, float, bool]]:
        """Return name and time of what lies in the trash, and whether it can be had back."""
        if not self.root.exists():
            return []
        return [(t.name, t.time, not t.erasing) for t in trashed(place_of(self.root), FORMATS)]

    def thing_at(self, path: str) -> tuple[str, float, bool]:
        found = [t for t in trashed(place_of(self.root), FORMATS) if t.path == path]
        return found[0].name, found[0].time, not found[0].erasing

    def behind(self) -> bool:
        """Whether the log goes further than the clock."""
        return (log.last_time(read(self.root)) or 0.0) > self.now + SKEW

    def step_of(self, name: str) -> int:
        return int(name.removesuffix(".pt").rpartition("-")[2])


def test_lives(pytestconfig: pytest.Config) -> None:
    full = pytestconfig.getoption("campaign") == "full"
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=1500 if full else 12,
            stateful_step_count=40 if full else 14,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
