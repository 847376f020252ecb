"""Random histories of a root in an object store: saves, set-backs, gcs, kills, and what holds."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest

from ftckpt.errors import FtckptError
from ftckpt.retention.apply.purge import purge, undelete
from ftckpt.retention.apply.run import apply
from tests.builders.small_format import MARKER, Small
from tests.retention.remote_roots import (
    HOUR,
    Died,
    Mortal,
    TimedStore,
    keys,
    newest,
    place_of,
    planned,
    save,
)

FILES = frozenset({MARKER, "data", "deep/data"})
BEGUN = b"a new beginning"

_EVENTS = (
    "save",
    "save again",
    "begin again",
    "beside",
    "apply",
    "free",
    "purge",
    "undelete",
    "wait",
)
_OFTEN = (3, 3, 1, 1, 4, 1, 4, 2, 3)


def any_event(choose: Random) -> tuple[str, int, int]:
    """Return what happens, to which of the old steps, and how many changes a process lives for."""
    (kind,) = choose.choices(_EVENTS, _OFTEN)
    life = choose.randrange(40) if choose.random() < 0.3 else 1000
    return kind, choose.randrange(3), life


class History:
    """A root, and everything that was ever saved there."""

    def __init__(self) -> None:
        self.store = TimedStore()
        self.steps: list[int] = []
        self.live: set[int] = set()
        for _ in range(3):
            self.save(len(self.steps) + 1)

    def save(self, step: int) -> None:
        self.store.now += HOUR
        save(self.store, f"step-{step}", step)
        self.steps = sorted({*self.steps, step})
        self.live.add(step)

    def happen(self, kind: str, which: int, life: int) -> None:
        self.store.now += 700  # the lease of a gc that was killed has ended
        match kind:
            case "save":
                self.save(self.steps[-1] + 1)
            case "save again":
                self.save(self.steps[which % len(self.steps)])
            case "begin again":
                step = self._old(which)
                self.live.discard(step)
                self.store.put(f"step-{step}/data", BEGUN)
            case "beside":
                self.store.put(f"step-{self._old(which)}/metrics.json", b"{}")
            case "apply" | "free":
                self._gc(life, purge_now=kind == "free")
            case "purge":
                self._mortal(life, lambda s: purge(place_of(s), [Small()], **self._who(s)))
            case "undelete":
                name = f"step-{self._old(which)}"
                self._mortal(
                    life, lambda s: undelete(place_of(s), [Small()], [name], **self._who(s))
                )
            case "wait":
                self.store.now += (1, 6, 25)[which] * HOUR

    def _old(self, number: int) -> int:
        """Return a step that is none of the two newest, which nothing is done to here."""
        return self.steps[number % (len(self.steps) - 2)]

    def _gc(self, left: int, *, purge_now: bool) -> None:
        def carry_out(store: TimedStore) -> None:
            plan = planned(store, now=store.now).plan
            if not plan.broken:
                self.live -= {int(name.removeprefix("step-")) for name in plan.order}
            apply(plan, place_of(store), [Small()], purge_now=purge_now, **self._who(store))

        self._mortal(left, carry_out)

    def _mortal(self, left: int, work: Any) -> None:
        """Do something by a process that is killed at some change, or lives long enough."""
        with suppress(Died, FtckptError):
            work(Mortal(self.store, left))

    def _who(self, store: TimedStore) -> dict[str, Any]:
        return {"actor": "alice", "now": lambda: store.now}

    def check(self) -> None:
        """Hold the root to what nothing may break."""
        present = {e.path: e for e in self.store.walk("")}
        top = self.steps[-1]
        assert newest(self.store) == f"step-{top}"
        for step in self.steps:
            here = {f for f in FILES if f"step-{step}/{f}" in present}
            if step in self.live:  # saved since a plan last dropped it
                assert here == FILES
            elif here and here != FILES:  # what is not whole is trash, or has begun anew
                tombs = [p for p in present if p.endswith((f"~step-{step}", f"!step-{step}"))]
                assert tombs or self.store.read(f"step-{step}/data") == BEGUN
        assert not [k for k in keys(self.store) if k.split("/")[0] not in self._known()]

    def _known(self) -> set[str]:
        return {".ftckpt", *(f"step-{step}" for step in self.steps)}


def test_histories(pytestconfig: pytest.Config) -> None:
    full = pytestconfig.getoption("campaign") == "full"
    for seed in range(10_000 if full else 250):
        choose = Random(seed)
        history = History()
        try:
            for _ in range(choose.randrange(5, 20)):
                history.happen(*any_event(choose))
                history.check()
            finish(history)
        except AssertionError as error:
            error.add_note(f"history {seed}")
            raise


def finish(history: History) -> None:
    """Let a gc that nobody kills get through; it keeps the newest two."""
    store = history.store
    store.now += 700
    plan = planned(store, now=store.now).plan
    if not plan.broken:
        history.live -= {int(name.removeprefix("step-")) for name in plan.order}
        apply(plan, place_of(store), [Small()], actor="cron", now=lambda: store.now)
    history.check()
