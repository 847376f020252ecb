"""Local roots to carry plans out in: saves of every shape, and what a user would look at after."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ftckpt.checkpoint import Checkpoint, CommitState, Topology
from ftckpt.digests.blocks import WIDTH, block_count
from ftckpt.discovery import resolve as opening
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.discovery.resolve import Place
from ftckpt.discovery.roots import Child, Root
from ftckpt.manifest import FileDigest, Manifest
from ftckpt.own_files import SUFFIX
from ftckpt.retention.apply.outcome import Applied, Purged, Undeleted
from ftckpt.retention.apply.prepare import prepare
from ftckpt.retention.apply.purge import purge, undelete
from ftckpt.retention.apply.run import apply
from ftckpt.retention.policy import Policy
from ftckpt.retention.policy.plan import RetentionPlan
from ftckpt.storage import StoreOptions
from ftckpt.storage.source import Source
from ftckpt.storage.store import join
from tests.builders.small_format import Small, SmallCheckpoint

NOW = 1_800_000_000.0
HOUR, DAY = 3600.0, 86400.0
KEEP_2 = Policy(keep_last=2)


class OneFile(SmallCheckpoint):
    def members(self) -> Iterable[str]:
        return [self.source.name]


class Shapes(Small):
    """The small format, and the same as one file `NAME.pt`, which has no commit marker."""

    def recognise(self, listing: Listing) -> Recognition | None:
        if listing.single:
            known = listing.single.endswith(".pt")
            return Recognition(self.name, "one file", CommitState.NO_MARKER) if known else None
        return super().recognise(listing)

    def open(self, source: Source) -> Checkpoint:
        if not source.single:
            return super().open(source)
        checkpoint = OneFile(source=source, tensors={}, objects={})
        checkpoint.said = json.loads(source.read(source.name))["step"]
        return checkpoint


FORMATS = [Shapes()]


def save(root: Path, name: str, step: int, now: float = NOW, *, base: str = "") -> None:
    """Save a checkpoint: a directory with one below it, or, by its name, a file and its manifest.

    Args:
        root: where.
        name: `step-3` or `step-3.pt`.
        step: for its content.
        now: its files are an hour older for each step that it is below 100.
        base: the name of the one that it depends on.
    """
    content = json.dumps({"step": step, "state": "good"})
    path = root / name
    if name.endswith(".pt"):
        path.write_text(content)
        listed = FileDigest(name, len(content), bytes(WIDTH * block_count(len(content))))
        sealed = Manifest("small", step, Topology(), [listed])
        (root / (name + SUFFIX)).write_bytes(sealed.dump())
    else:
        (path / "deep").mkdir(parents=True)
        (path / "deep" / "shard").write_bytes(bytes([step % 251]) * 1000)
        if base:
            (path / "base").write_text(base)
        (path / "marker").write_text(content)
    age = now - (100 - step) * HOUR
    files = [*path.rglob("*"), path, root / (name + SUFFIX)]
    for file in files:
        if file.exists():
            os.utime(file, (age, age))


def bases(root: Root, child: Child) -> Sequence[str]:
    """Return what a checkpoint says that it depends on."""
    told = Path(root.store.local_path(child.part.entry.path) or "") / "base"
    return [join(root.base, told.read_text())] if told.exists() else []


def place_of(root: Path) -> Place:
    return opening.locate(str(root), StoreOptions())


def plan_of(root: Path, policy: Policy = KEEP_2, now: float = NOW) -> RetentionPlan:
    return prepare(place_of(root), FORMATS, policy, now, bases=bases).plan


def apply_to(
    root: Path, plan: RetentionPlan | None = None, now: float = NOW, **more: Any
) -> Applied:
    """Carry a plan out, by default the one that keeps two."""
    plan = plan_of(root, now=now) if plan is None else plan
    return apply(
        plan, place_of(root), FORMATS, actor="tester", now=lambda: now, bases=bases, **more
    )


def purge_in(root: Path, now: float, **more: Any) -> Purged:
    return purge(place_of(root), FORMATS, actor="tester", now=lambda: now, bases=bases, **more)


def undelete_in(root: Path, *names: str, now: float = NOW) -> Undeleted:
    return undelete(place_of(root), FORMATS, names, actor="tester", now=lambda: now, bases=bases)


def names_in(root: Path) -> set[str]:
    """Return the names in a root but ftckpt's own."""
    return {p.name for p in root.iterdir() if not p.name.startswith(".ftckpt")}


def dropped(applied: Applied) -> list[str]:
    return [d.entry.name for d in applied.dropped]


def snapshot(path: Path) -> dict[str, tuple[object, ...]]:
    """Return everything below a path: kind, time, link and bytes."""
    found: dict[str, tuple[object, ...]] = {}
    for each in sorted([path, *path.rglob("*")]):
        status = each.lstat()
        link = os.readlink(each) if each.is_symlink() else None
        content = each.read_bytes() if link is None and each.is_file() else None
        key = str(each.relative_to(path))
        found[key] = (status.st_mode, status.st_mtime_ns, link, content)
    return found


def saved(root: Path) -> dict[str, tuple[object, ...]]:
    """Return what lies in a root but what is ftckpt's own."""
    found = snapshot(root)
    return {k: v for k, v in found.items() if k != "." and not k.startswith(".ftckpt")}
