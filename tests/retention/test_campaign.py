"""Eight weeks of training beside an hourly gc, by a clock of their own, on real checkpoints.

`--campaign full` lives through all 55 days of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ftckpt.discovery import resolve as opening
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.delta.bases import bases
from ftckpt.retention.apply.outcome import Applied
from ftckpt.retention.apply.prepare import prepare, remember
from ftckpt.retention.apply.purge import purge, undelete
from ftckpt.retention.apply.run import apply
from ftckpt.retention.policy import Policy
from ftckpt.retention.records import pins
from ftckpt.storage import StoreOptions
from tests.retention.trainer import DAY, Trainer, digests

pytestmark = pytest.mark.slow

POLICY = Policy(keep_last=3, keep_every=1000)
SHORT, FULL = 4, 55

# After so many runs of cron so many are missed, in every campaign.
MISSED = {10: 1, 15: 5, 20: 48}


class Cron:
    """What runs `ftckpt gc ROOT --keep-last 3 --keep-every 1000 --apply` every hour."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.place = opening.locate(str(trainer.root), StoreOptions())
        self.pinned: set[str] = set()
        self.waiting: dict[str, int] = {}
        self.dropped: set[str] = set()
        self.lost: dict[str, Any] = {}
        self.runs = self.refused = self.freed = 0

    def run(self) -> None:
        """Plan, carry it out, and hold what it did to the truth."""
        trainer, now = self.trainer, self.trainer.now
        newest, before = trainer.newest(), dict(trainer.whole)
        prepared = prepare(self.place, FORMATS, POLICY, now, bases=bases)
        self.runs += 1
        if prepared.plan.broken:
            self.refused += 1
            return
        remember(prepared)
        applied = apply(
            prepared.plan,
            self.place,
            FORMATS,
            actor="cron",
            now=lambda: now,
            trash_ttl=DAY,
            bases=bases,
        )
        self.account(applied)
        assert [d.entry.name for d in applied.dropped] == list(prepared.plan.order)
        assert not applied.failed
        there = {p.name for p in trainer.root.iterdir()}
        assert newest in there
        assert newest in trainer.whole
        for name, saved in before.items():
            if name in there:
                assert not saved.upon or saved.upon in there, f"{name} lost its base"
        assert self.pinned <= there
        assert sum(name in there for name in before) >= min(2, len(before))
        self.lost |= {n: before[n] for n in self.dropped & before.keys() if n not in there}
        for name in before.keys() - there:
            del trainer.whole[name]
        # Deciding again finds nothing more to drop.
        assert not prepare(self.place, FORMATS, POLICY, now, bases=bases).plan.order

    def account(self, applied: Applied) -> None:
        """Hold what was freed to what the plans had said."""
        for decision, thing in zip(applied.dropped, applied.trashed, strict=True):
            assert decision.frees is not None
            self.waiting[thing.path] = decision.frees
            self.dropped.add(decision.entry.name)
        if applied.purged is not None:
            said = [self.waiting.pop(t.path) for t in applied.purged.erased]
            assert applied.purged.freed == sum(said)
            assert not applied.purged.held
            assert not applied.purged.failed
            self.freed += applied.purged.freed

    def change_of_mind(self, name: str) -> None:
        """Have one back within its day, whole, and pin it; its base comes with it."""
        trainer, now = self.trainer, self.trainer.now
        wanted = [name]
        while (upon := self.lost[wanted[-1]].upon) and upon not in trainer.whole:
            if upon not in self.lost:
                return  # damaged long ago, or purged: nothing of this chain can be whole
            wanted.append(upon)
        back = undelete(self.place, FORMATS, wanted, actor="alice", now=lambda: now)
        if back.failed:  # purged already
            assert all(now - self.lost[n].time > DAY for n in back.failed)
        for thing in back.restored:
            trainer.whole[thing.name] = self.lost.pop(thing.name)
            self.waiting.pop(thing.path)
            root = opening.open_root(self.place, FORMATS)
            pins.pin(root, thing.name, owner="alice", reason="wanted it after all", now=now)
            self.pinned.add(thing.name)
        for one in [t.name for t in back.restored][::-1]:
            assert digests(trainer.root / one) == trainer.whole[one].digest

    def can_be_had_back(self) -> list[str]:
        return sorted(
            p.name.partition("~")[2] for p in self._trash() if p.name.partition("~")[2] in self.lost
        )

    def _trash(self) -> Iterator[Path]:
        trash = self.trainer.root / ".ftckpt/trash"
        yield from trash.iterdir() if trash.exists() else ()


def test_eight_weeks(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    days = FULL if pytestconfig.getoption("campaign") == "full" else SHORT
    choose = Random(1)
    trainer = Trainer(tmp_path / "run", choose, days)
    cron = Cron(trainer)
    end = trainer.now + days * DAY
    while trainer.now < end:
        # A machine is down now and then: one run of cron is missed, or five, or two days of them.
        by_chance = choose.choices((0, 1, 5, 48), (95, 3, 1, 0.5))[0]
        missed = MISSED.get(cron.runs, by_chance)
        for _ in range(1 + missed):
            trainer.hour()
        cron.run()
        wanted = cron.can_be_had_back()
        if wanted and choose.random() < 0.02:
            cron.change_of_mind(choose.choice(wanted))
    assert cron.runs > 5 * days
    assert cron.refused == 0
    _check_survivors(trainer)
    _check_log(trainer, cron)
    # In the end everything that was ever dropped is freed, and not a byte more.
    trainer.now += 2 * DAY
    purged = purge(
        cron.place, FORMATS, actor="cron", now=lambda: trainer.now, trash_ttl=DAY, bases=bases
    )
    assert purged.freed == sum(cron.waiting.values())
    assert not list(cron._trash())


def _check_survivors(trainer: Trainer) -> None:
    """What is left is what the rules keep, and every byte of it is as it was saved."""
    for name, saved in trainer.whole.items():
        assert digests(trainer.root / name) == saved.digest
    steps = [saved.step for saved in trainer.whole.values()]
    missing = [
        multiple
        for multiple in range(1000, max(steps) + 1, 1000)
        if min(abs(step - multiple) for step in steps) > 100
    ]
    assert len(missing) <= len(list(trainer.root.glob("step-*"))) - len(trainer.whole)


def _check_log(trainer: Trainer, cron: Cron) -> None:
    """The log says why each is gone, and why each is there."""
    lines = (trainer.root / ".ftckpt/log.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    dropped: dict[str, list[str]] = {}
    kept: dict[str, list[str]] = {}
    for event in events:
        if event["event"] == "applying":
            dropped |= event["drop"]
            kept = event["keep"]
    assert dropped.keys() >= cron.dropped
    assert all(reasons for reasons in (*dropped.values(), *kept.values()))
    assert sum(event["event"] == "applied" for event in events) == cron.runs
