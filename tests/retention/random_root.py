"""A root on disk by chance, and what is true of it in the words of docs/retention.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.discovery.roots import Child, Root
from ftckpt.findings import Finding, finding
from ftckpt.manifest import PassedCheck
from ftckpt.progress import NULL, Counter
from ftckpt.storage.source import Source
from ftckpt.storage.store import join
from tests.builders.manifests import write_manifest
from tests.builders.small_format import SmallCheckpoint, write
from tests.retention.carrying import OneFile
from tests.retention.oracle import Thing
from tests.retention.scan.test_read import JudgedFormat

NOW = 1_800_000_000.0
HOUR, DAY = 3600.0, 86400.0

# What a name says, by the page; None where the content is asked.
_NAMES = (
    *("step-{}", "checkpoint-{}", "global_step{}", "iter_{:07}", "{}", "step_{}") * 2,
    *("best-step-{}", "epoch=0-step={}-val_loss=0.25", "last-checkpoint-{}", "epoch_2_step_{}"),
)
_OTHER = ("old-step-{}", "warm-up-{}", "step-{}-copy")
_ROLES = ("best", "last", "final", "release", "initial", "latest")


class JudgedFile(OneFile):
    """One file, which says of itself whether it is cut short."""

    state = "good"

    def check(self, counter: Counter = NULL) -> Iterator[Finding]:
        cut = self.state == "short"
        return iter([finding("truncated-file", "data is cut short", file="data")] if cut else ())


class Everything(JudgedFormat):
    """The judged format, and the same as one file `NAME.pt`, which has no commit marker."""

    def recognise(self, listing: Listing) -> Recognition | None:
        if listing.single:
            known = listing.single.endswith(".pt")
            return Recognition(self.name, "one file", CommitState.NO_MARKER) if known else None
        return super().recognise(listing)

    def open(self, source: Source) -> SmallCheckpoint:
        if not source.single:
            return super().open(source)
        checkpoint = JudgedFile(source=source, tensors={}, objects={})
        content = json.loads(source.read(source.name))
        checkpoint.said, checkpoint.state = content["step"], content["state"]
        return checkpoint


def bases(root: Root, child: Child) -> Sequence[str]:
    """Return what a checkpoint says that it depends on."""
    told = Path(root.store.local_path(child.part.entry.path) or "") / "base"
    return [join(root.base, told.read_text())] if told.exists() else []


class RandomRun:
    """One run of a random root.

    Args:
        choose: where chance comes from.
        place: the directory of the root.
        run: the path of the run below it, "" for the place itself.
    """

    def __init__(self, choose: Random, place: Path, run: str) -> None:
        self.choose = choose
        self.run = run
        self.path = place / run
        self.path.mkdir(parents=True, exist_ok=True)
        self.things: dict[str, Thing] = {}
        self.steps = [choose.choice((0, 1, 5)) + i * choose.choice((3, 10)) for i in range(9)]
        self.steps += [choose.choice((10**7, 10**7 + 3))] if choose.random() < 0.1 else []
        self._save("step-77", 77, "good")  # by this it is known to be a run
        kinds = choose.choices(list(_KINDS), list(_KINDS.values()), k=choose.choice((4, 9, 15)))
        for kind in kinds:
            getattr(self, kind)()
        for _ in range(choose.choice((0, 1, 3))):
            self.hold()

    def good(self) -> None:
        """A finished save, perhaps sealed, perhaps a delta."""
        step = self.choose.choice(self.steps)
        self._save(self.choose.choice(_NAMES).format(step), step, "good")

    def nameless(self) -> None:
        """A finished save whose name says no step: somebody's copy."""
        step = self.choose.choice((*self.steps, None))
        name = self.choose.choice(_OTHER).format(self.choose.choice("abc"))
        self._save(name, step, "good")
        self._now(name, copied=True)

    def aside(self) -> None:
        """What somebody put aside: sound, damaged, or without its marker."""
        step = self.choose.choice(self.steps)
        name, state = f"step-{step}.bad", self.choose.choice(("good", "short", "torn"))
        if state != "torn":
            self._save(name, step, state, damaged="CORRUPT" if state == "short" else "")
        elif not (self.path / name).exists():
            age = self._age()
            write(self.path, name, None, "torn")
            _old(self.path / name, age)
            # Its name says no step, and nothing is read of what is not finished.
            self._is(name, "ABANDONED" if age >= DAY else "STAGING", None, age)
        self._now(name, aside=True)

    def role(self) -> None:
        """A save that a trainer loads by its name."""
        self._save(self.choose.choice(_ROLES), self.choose.choice(self.steps), "good", role=True)

    def short(self) -> None:
        """A damaged save, which shows when it is opened."""
        step = self.choose.choice(self.steps)
        self._save(self.choose.choice(_NAMES).format(step), step, "short", damaged="CORRUPT")

    def one_file(self) -> None:
        """A checkpoint of one file, whole or damaged."""
        step = self.choose.choice(self.steps)
        name, age = f"step-{step}.pt", self._age()
        path = self.path / name
        if path.exists():
            return
        state = self.choose.choice(("good", "good", "short"))
        path.write_text(json.dumps({"step": step, "state": state}))
        _old(path, age)
        turns_out = "CORRUPT" if age >= DAY else "STAGING"
        self._is(name, "COMMITTED", step, age, damaged=turns_out if state == "short" else "")

    def torn(self) -> None:
        """A save without its marker; sealed once, it is damaged."""
        step = self.choose.choice(self.steps)
        name, age = self.choose.choice(_NAMES).format(step), self._age()
        if (self.path / name).exists():
            return
        write(self.path, name, None, "torn")
        _old(self.path / name, age)
        if self.choose.random() < 0.2:
            self._seal(name, checked=True)
            self._is(name, "CORRUPT", step, None)
            return
        self._is(name, "ABANDONED" if age >= DAY else "STAGING", step, age)

    def unfinished(self) -> None:
        """What its name says is unfinished."""
        step = self.choose.choice(self.steps)
        name, age = f"step-{step}.tmp", self._age()
        if (self.path / name).exists():
            return
        write(self.path, name, step)
        _old(self.path / name, age)
        self._is(name, "ABANDONED" if age >= DAY else "STAGING", step, age)

    def foreign(self) -> None:
        """What no format knows, what this version does not read, and a link that leads away."""
        step = self.choose.choice(self.steps)
        name = f"foreign-{self.choose.choice('abc')}"
        which = self.choose.choice(("notes", "frozen", "link"))
        if which == "notes" and not (self.path / name).exists():
            (self.path / name).mkdir()
            (self.path / name / "notes.txt").write_text("x")
        elif which == "frozen" and not (self.path / f"step-{step}").exists():
            name = f"step-{step}"
            write(self.path, name, step)
            (self.path / name / "frozen").touch()
            _old(self.path / name, self._age())
        elif which == "link" and not (self.path / "step-88").is_symlink():
            name = "step-88"
            away = self.path.parent.parent / f"away-{self.run.strip('/')}"
            away.mkdir(exist_ok=True)
            (self.path / name).symlink_to(away)
        else:
            return
        self._is(name, "FOREIGN", None, None)

    def trash(self) -> None:
        """What was dropped before."""
        name = f".ftckpt/trash/20260101T000000.{self.choose.randrange(10**6):06}Z~step-5"
        if not (self.path / name).exists():
            write(self.path, name, 5)
            self._is(name, "TRASH", None, None)

    def hold(self) -> None:
        """Somebody or something claims a checkpoint."""
        how = self.choose.choice(("pin", "tag", "lease", "ended", "latest", "tracker", "link"))
        held = [t for t in self.things.values() if t.kind not in ("TRASH", "FOREIGN")]
        name = self.choose.choice(held).name[len(self.run) :].lstrip("/")
        if how in ("latest", "tracker", "link"):
            self._point(how, name)
            return
        kinds = {"pin": "pins", "tag": "tags", "lease": "leases", "ended": "leases"}
        folder = self.path / ".ftckpt" / kinds[how] / name.replace("=", "%3D")
        folder.mkdir(parents=True, exist_ok=True)
        ends = NOW + 600 if how == "lease" else NOW - 5
        record = {"owner": "alice", "reason": "why", "time": 1.0, "expires": ends}
        label = "milestone" if how == "tag" else f"{how}-alice"
        (folder / f"{label}.json").write_text(json.dumps(record))
        if how == "pin":
            self._now(name, pinned=True)
        elif how == "lease":
            self._now(name, leased=True)
        elif how == "tag":
            self._now(name, tags=frozenset({"milestone"}))

    def _point(self, how: str, name: str) -> None:
        if how == "latest" and not (self.path / "latest").exists():
            (self.path / "latest").write_text(name + "\n")
            self._now(name, pointed=True)
        elif how == "link" and not (self.path / "newest").is_symlink():
            (self.path / "newest").symlink_to(name)
            self._now(name, pointed=True)
        elif how == "tracker":
            tracker = self.path / "latest_checkpointed_iteration.txt"
            said = [s for n, s in self._said.items() if s is not None and not n.endswith(".tmp")]
            if tracker.exists() or not said:
                return
            step = self.choose.choice(said)
            tracker.write_text(f"{step}\n")
            for other, by_name in self._said.items():
                if by_name == step and not other.endswith(".tmp"):
                    self._now(other, pointed=True)

    @property
    def _said(self) -> dict[str, int | None]:
        """What the names of all that may be checkpoints say."""
        said: dict[str, int | None] = {}
        for thing in self.things.values():
            name = thing.name[len(self.run) :].lstrip("/")
            if thing.kind == "FOREIGN":
                said[name] = int(name[5:]) if name.startswith("step-") else None
            elif thing.kind != "TRASH":
                by_name = name not in _ROLES and not (thing.copied or thing.aside)
                said[name] = thing.step if by_name else None
        return said

    def _save(
        self, name: str, step: int | None, state: str, *, damaged: str = "", role: bool = False
    ) -> None:
        path = self.path / name
        if path.exists():
            return
        write(self.path, name, step, state)
        (path / "shard").write_bytes(b"x" * 9)
        (path / "other").write_bytes(b"y" * 9)
        age = self._age()
        known = [t for t in self.things.values() if t.kind == "COMMITTED" and not t.damaged]
        upon: tuple[str, ...] = ()
        if known and self.choose.random() < 0.15:
            upon = (self.choose.choice(known).name,)
            (path / "base").write_text(upon[0][len(self.run) :].lstrip("/"))
        _old(path, age)
        metric = None
        if self.choose.random() < 0.4:
            metric = self.choose.choice((0.5, 1.0, 1.5, 2.0))
            (path / "metrics.json").write_text(json.dumps({"loss": metric}))
        verified = False
        if self.choose.random() < 0.3:
            verified = self.choose.random() < 0.6
            self._seal(name, checked=verified)
        self._is(
            name, "COMMITTED", step, age, upon=upon, metric=metric,
            verified=verified, damaged=damaged, named=role or name.startswith(("best-", "last-")),
        )  # fmt: skip

    def _seal(self, name: str, *, checked: bool) -> None:
        level = ("content", "crc32") if checked else ("structure", "none")
        write_manifest(self.path / name, PassedCheck(*level, "2026-01-31T12:00:00Z"))

    def _age(self) -> float:
        """Mostly hours of the last days; some weeks, some dated in the future."""
        hours = self.choose.choice((0.5, 3, 3, 7, 20, 30, 30.5, 50, 200, 900, 1500))
        return -2 * DAY if self.choose.random() < 0.06 else hours * HOUR

    def _is(
        self, name: str, kind: str, step: int | None, age: float | None, **more: object
    ) -> None:
        full = f"{self.run}/{name}" if self.run else name
        time = None if age is None else NOW - age
        thing = Thing(full, self.run, kind, step, time, **more)  # type: ignore[arg-type]
        self.things[full] = thing

    def _now(self, name: str, **more: object) -> None:
        full = f"{self.run}/{name}" if self.run else name
        self.things[full] = replace(self.things[full], **more)  # type: ignore[arg-type]


_KINDS = {
    "good": 20, "nameless": 2, "aside": 2, "role": 1, "short": 3, "one_file": 2, "torn": 3,
    "unfinished": 1, "foreign": 1, "trash": 1,
}  # fmt: skip


def _old(path: Path, age: float) -> None:
    inside = path.rglob("*") if path.is_dir() else ()
    for each in [*inside, path]:
        os.utime(each, (NOW - age, NOW - age), follow_symlinks=False)
