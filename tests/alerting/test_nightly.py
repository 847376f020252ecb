"""Days of training beside a nightly cron, by a clock of their own, on real checkpoints.

Every night: scrub, gc that thins, sync, status, each with `--on-alert`. Meanwhile the trainer
crashes and pauses, a bit flips, a gc is killed, the disk is full, the tier is away, and nights are
missed. `--campaign full` lives through thirty days of it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ftckpt.own_files import WEIGHTS
from ftckpt.verification import scrub as scrubbing
from tests.builders.checkpoints import flip
from tests.commands.saves import DAY, HOUR, answer
from tests.killing import run_until
from tests.test_docs import validate

pytestmark = pytest.mark.slow

SHORT, FULL = 8, 30
EVERY, STEPS = 6 * HOUR, 100
KEEP = ["--keep-last", "4", "--keep-every", "400", "--thin-after", "2d"]
# So many bytes a second, for so long: about half of what lies there.
RATE, BUDGET = 50_000.0, 14.0
# Promised: every save is read once in so many days, one missed night included.
WITHIN = 4 * DAY


# On which day each thing happens first; then every week.
FIRST = {
    "crash": 1, "damage": 2, "away": 3, "kill": 3, "full": 4, "pause": 5, "missed": 6,
}  # fmt: skip


class Clock:
    """The time of the simulation; reading takes as long as its bytes at `RATE`."""

    def __init__(self, patch: pytest.MonkeyPatch, days: int) -> None:
        self.now = time.time() - (days + 1) * DAY
        self.read = 0.0
        real = scrubbing.Scrub.done

        def done(scrub: Any, child: Any, report: Any) -> None:
            self.read += report.bytes_read / RATE
            real(scrub, child, report)

        class Module:
            time = staticmethod(lambda: self.now)
            monotonic = staticmethod(lambda: self.read)

        patch.setattr(scrubbing.Scrub, "done", done)
        patch.setattr(scrubbing.Scrub, "_speed", lambda _: RATE)
        patch.setattr(scrubbing, "time", Module)
        patch.setattr(time, "time", lambda: self.now)


class Run:
    """A root with a trainer, its tier, and the truth about both."""

    def __init__(self, path: Path, clock: Clock, choose: Random) -> None:
        import torch

        self.root, self.tier, self.box = path / "run", path / "tier", path / "box"
        self.root.mkdir()
        self.tier.mkdir()
        self.state = path / "told"
        self.clock, self.choose = clock, choose
        self.step = 0
        self.weights: dict[int, dict[str, Any]] = {}
        self.saved: dict[int, float] = {}
        self.damaged: set[str] = set()
        self.torch = torch
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.known: set[str] = set()  # damage that a scrub has found
        # What lasts, by verb and kind: what was told of it. And every alert that came.
        self.active: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.came: set[tuple[str, str, str]] = set()

    def save(self, *, crash: bool = False) -> None:
        """Train, and save by torch; a crash leaves the marker out."""
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import save

        self.clock.now += EVERY
        self.step += STEPS
        self.model(self.torch.full((1, 64), float(self.step % 7))).sum().backward()
        self.optimizer.step()
        model, optimizer = get_state_dict(self.model, self.optimizer)
        path = self.root / f"step-{self.step}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = {"model": model, "optim": optimizer, "step": self.step}
            save(state, checkpoint_id=path, no_dist=True)
        if crash:
            (path / ".metadata").unlink()
        else:
            self.saved[self.step] = self.clock.now
            self.weights[self.step] = {
                key: value.clone() for key, value in self.model.state_dict().items()
            }
        date(path, self.clock.now)

    def cron(self, *words: str) -> dict[str, Any]:
        """Run one line of the crontab."""
        state = f"{self.state}-{words[0]}"
        return answer(*words, "--on-alert", f"cat >> {self.box}", "--alert-state", state)

    def gc(self) -> dict[str, Any]:
        done = self.cron("gc", str(self.root), *KEEP, "--apply")
        # What was written now was written at the time of the simulation.
        for path in self.root.glob(f"*{WEIGHTS}"):
            if path.stat().st_mtime > self.clock.now:
                date(path, self.clock.now)
        return done

    def told(self, verb: str, kinds: dict[str, set[str]], *, complete: bool = True) -> None:
        """Hold what came to what there is: new things once, and what is over once."""
        lines = self.box.read_text().splitlines() if self.box.exists() else []
        self.box.unlink(missing_ok=True)
        came = []
        for line in lines:
            document = json.loads(line)
            validate(document)
            came.append((document["verb"], document["event"], document["kind"]))
            self.came.add(came[-1])
        expected = []
        for kind, subjects in kinds.items():
            if subjects - self.active[verb, kind]:
                expected.append((verb, "raised", kind))
            self.active[verb, kind] = subjects if complete else subjects | self.active[verb, kind]
        for key, subjects in list(self.active.items()) if complete else ():
            if key[0] == verb and key[1] not in kinds and subjects:
                expected.append((verb, "cleared", key[1]))
                self.active[key] = set()
        assert sorted(came) == sorted(expected), (verb, self.step)

    def night(self, *, full: bool = False, away: bool = False, stale: bool = False) -> None:
        """Do what cron does, and hold each answer to the truth."""
        self.clock.now += 3 * HOUR
        found = self.cron("scrub", str(self.root), "--budget", f"{BUDGET:g}s")
        bad = {Path(c["target"]).name for c in found["checkpoints"] if c["findings"]}
        seen = {n for n in self.damaged if (self.root / n).exists()} & (bad | self.known)
        self.known = seen
        self.told("verify", {"corrupt": seen} if seen else {})
        with self.disk(full=full):
            done = self.gc()
        failed = {one["name"] for one in done["thinned"]["failed"]}
        assert failed <= self.damaged or full
        self.told("gc", {"not-thinned": failed} if failed else {})
        if away:
            self.tier.rename(self.tier.with_name("elsewhere"))
        shipped = self.cron("sync", str(self.root), str(self.tier))
        if away:
            assert shipped["result"]["code"] == 9
            self.told("sync", {"not-found": {""}}, complete=False)
            self.tier.with_name("elsewhere").rename(self.tier)
        else:
            lost = {i["name"] for i in shipped["items"] if i["state"] == "failed"}
            assert lost <= self.damaged
            self.told("sync", {"not-shipped": lost} if lost else {})
        status = self.cron(
            "status", str(self.root), "--expect-interval", "6h", "--scrub-every", "4d"
        )
        kinds = ({"stale": {""}} if stale else {}) | ({"corrupt": seen} if seen else {})
        assert {alert["kind"] for alert in status["alerts"]} == set(kinds)
        self.told("status", kinds)
        self.check()
        self.clock.now -= 3 * HOUR

    def check(self) -> None:
        """No good one is lost, one of each step shows, and each was read in the promised days."""
        names = {path.name for path in self.root.iterdir()}
        for step in self.weights:
            name = f"step-{step}"
            if step % 400 == 0 and name not in self.damaged:
                assert len(names & {name, name + WEIGHTS}) == 1, name
        newest = sorted(self.weights)[-2:]
        assert {f"step-{step}" for step in newest} <= names
        # The newest that nobody knows to be damaged.
        found = answer("latest", str(self.root))["step"]
        assert f"step-{found}" not in self.known
        assert found >= max(s for s in self.weights if f"step-{s}" not in self.damaged)
        verdicts = self.root / ".ftckpt" / "verdicts"
        for path in self.root.glob("step-*"):
            if (path / ".metadata").exists():
                said = [
                    json.loads(one.read_text())
                    for one in (verdicts / path.name.replace(".", "%2E")).glob("*")
                ]
                read = max([one["checked"] for one in said], default=path.stat().st_mtime)
                assert self.clock.now - read <= WITHIN, path.name

    @contextmanager
    def disk(self, *, full: bool) -> Iterator[None]:
        """Let no weights be written."""
        with pytest.MonkeyPatch.context() as patch:
            if full:

                def refuse(*_: object) -> int:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

                patch.setattr(os, "pwrite", refuse)
                patch.setattr(os, "ftruncate", refuse)
            yield

    def kill_gc(self, point: int) -> None:
        """Kill a gc at one of its changes."""

        def work() -> None:
            answer("gc", str(self.root), *KEEP, "--apply")

        run_until(work, point)
        # A lease that a killed one has left ends after half an hour.
        shutil.rmtree(self.root / ".ftckpt/leases", ignore_errors=True)

    def damage(self) -> None:
        """Flip a bit of the newest milestone that is whole, in what nobody will look at again."""
        for step in sorted(self.weights, reverse=True):
            path = self.root / f"step-{step}"
            if step % 400 == 0 and path.exists() and path.name not in self.damaged:
                data = path / "__0_0.distcp"
                then = data.stat().st_mtime
                flip(data, data.stat().st_size // 2)
                date(path, then)
                self.damaged.add(path.name)
                return

    def check_weights(self) -> None:
        """Load every thinned milestone by torch, and compare it with what was saved."""

        from torch.distributed.checkpoint.state_dict_loader import load

        found = set()
        for path in self.root.glob(f"*{WEIGHTS}"):
            step = int(path.name.removeprefix("step-").removesuffix(WEIGHTS))
            state = {"model": {k: self.torch.zeros_like(v) for k, v in self.weights[step].items()}}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(state, checkpoint_id=path, no_dist=True)
            for key, value in self.weights[step].items():
                assert self.torch.equal(state["model"][key], value)
            found.add(step)
        late = max(self.saved.values()) - 2 * DAY
        whole = {int(name.removeprefix("step-")) for name in self.damaged}
        old = {s for s, then in self.saved.items() if not s % 400 and then < late}
        assert found >= old - whole  # where a save failed, the nearest one is the milestone
        assert len(found) <= max(self.saved) // 400


def date(path: Path, then: float) -> None:
    for each in (*path.rglob("*"), path):
        os.utime(each, (then, then))


def test_days_of_training_beside_cron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    days = FULL if pytestconfig.getoption("campaign") == "full" else SHORT
    choose = Random(7)
    run = Run(tmp_path, Clock(monkeypatch, days), choose)
    for day in range(days):
        today = {kind for kind, first in FIRST.items() if day >= first and not (day - first) % 7}
        paused = "pause" in today
        for number in range(4):
            if paused and number:
                run.clock.now += EVERY
            else:
                run.save(crash="crash" in today and number == 2)
        if "damage" in today:
            run.damage()
        if "kill" in today:
            run.kill_gc(choose.randrange(5, 60))
        if "missed" not in today:
            run.night(full="full" in today, away="away" in today, stale=paused)
    run.save()
    run.night()
    run.check_weights()
    assert run.came >= {
        ("verify", "raised", "corrupt"), ("status", "raised", "corrupt"),
        ("status", "raised", "stale"), ("status", "cleared", "stale"),
        ("sync", "raised", "not-found"), ("sync", "cleared", "not-found"),
        ("gc", "raised", "not-thinned"),
    }  # fmt: skip
