"""A root on disk, read as entries: every class, and what is opened for it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from ftckpt.discovery import resolve as opening
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.discovery.roots import Child, Root
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    NotFoundError,
    UnavailableError,
    UnsafeError,
)
from ftckpt.findings import Finding, finding
from ftckpt.health.survey import survey
from ftckpt.manifest import PassedCheck
from ftckpt.progress import NULL, Counter
from ftckpt.retention.apply.prepare import Prepared, prepare, remember
from ftckpt.retention.locks import leases
from ftckpt.retention.policy import Metric, Policy
from ftckpt.retention.records import pins, tags
from ftckpt.retention.scan.entries import EntryClass, RootEntry
from ftckpt.retention.scan.entry import ScanOptions
from ftckpt.storage import StoreOptions
from ftckpt.storage.local.store import LocalStore
from ftckpt.storage.source import Source
from tests.builders.manifests import write_manifest
from tests.builders.small_format import DATA, MARKER, Small, SmallCheckpoint, read, write

NOW = time.time()
HOUR, DAY = 3600.0, 86400.0
KEEP_2 = Policy(keep_last=2)


class Judged(SmallCheckpoint):
    """Fails its structure check where its state says so."""

    def check(self, counter: Counter = NULL) -> Any:
        found: list[Finding] = []
        if self.state == "short":
            found.append(finding("truncated-file", "data is cut short", file="data"))
        return iter(found)


class JudgedFormat(Small):
    """The small format, and a file `frozen` for what this version does not read."""

    def recognise(self, listing: Listing) -> Recognition | None:
        found = super().recognise(listing)
        if found is not None and "frozen" in listing.files:
            return found._replace(supported=False, reason="it is frozen")
        return found

    def open(self, source: Source) -> SmallCheckpoint:
        known = super().open(source)
        assert isinstance(known, SmallCheckpoint)
        judged = Judged(source=source, tensors={}, objects={})
        judged.said, judged.state = known.said, known.state
        return judged


def save(root: Path, name: str, step: int | None, age: float, state: str = "good") -> None:
    """Write a checkpoint whose files are so old."""
    write(root, name, step, state)
    old(root / name, age)


def old(path: Path, age: float) -> None:
    """Make everything at a path so old."""
    for each in [*path.rglob("*"), path]:
        os.utime(each, (NOW - age, NOW - age), follow_symlinks=False)


def plan_of(
    root: Path | str, policy: Policy = KEEP_2, small: Small | None = None, **more: Any
) -> Prepared:
    place = opening.locate(str(root), StoreOptions())
    return prepare(place, [small or JudgedFormat()], policy, NOW, **more)


def entries_of(root: Path, policy: Policy = KEEP_2) -> dict[str, RootEntry]:
    return {name: found.entry for name, found in plan_of(root, policy).found.items()}


def classes_of(root: Path) -> dict[str, EntryClass]:
    return {name: entry.entry_class for name, entry in entries_of(root).items()}


def dropped(prepared: Prepared) -> list[str]:
    return [d.entry.name for d in prepared.plan.drop]


def kept(prepared: Prepared) -> set[str]:
    return {d.entry.name for d in prepared.plan.keep}


def test_every_class(tmp_path: Path) -> None:
    save(tmp_path, "step-1", 1, 9 * HOUR)
    save(tmp_path, "step-2", 2, 8 * HOUR)
    save(tmp_path, "step-3", 3, 7 * HOUR)
    save(tmp_path, "step-4", 4, 20 * HOUR, "torn")
    save(tmp_path, "step-5", 5, 25 * HOUR, "torn")
    save(tmp_path, "step-6", 6, 6 * HOUR, "damaged")
    save(tmp_path, "step-7.tmp", 7, 1 * HOUR)
    save(tmp_path, "step-8.tmp", 8, 30 * HOUR)
    save(tmp_path, "step-9", 9, 5 * HOUR, "torn")
    (tmp_path / "step-9/ftckpt.manifest.json").write_text("{}")
    save(tmp_path, "step-10", 10, HOUR)
    (tmp_path / "step-10/frozen").touch()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "step-11").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / ".ftckpt/trash/step-0").mkdir(parents=True)
    elsewhere = tmp_path.parent / "elsewhere"
    save(elsewhere, "step-12", 12, HOUR)
    (tmp_path / "step-12").symlink_to(elsewhere / "step-12")
    assert classes_of(tmp_path) == {
        "step-1": EntryClass.COMMITTED,
        "step-2": EntryClass.COMMITTED,
        "step-3": EntryClass.COMMITTED,
        "step-4": EntryClass.STAGING,
        "step-5": EntryClass.ABANDONED,
        "step-6": EntryClass.CORRUPT,
        "step-7.tmp": EntryClass.STAGING,
        "step-8.tmp": EntryClass.ABANDONED,
        "step-9": EntryClass.CORRUPT,
        "step-10": EntryClass.FOREIGN,
        "notes.txt": EntryClass.FOREIGN,
        "step-11": EntryClass.FOREIGN,
        "old": EntryClass.FOREIGN,
        "step-12": EntryClass.FOREIGN,
        ".ftckpt/trash/step-0": EntryClass.TRASH,
    }
    assert set(dropped(plan_of(tmp_path))) == {"step-1", "step-5", "step-8.tmp"}


def test_a_damaged_one_makes_room_for_the_next(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, f"step-{step}", step, (10 - step) * HOUR)
    save(tmp_path, "step-7", 7, 2 * HOUR, "short")
    save(tmp_path, "step-8", 8, 1 * HOUR, "damaged")
    prepared = plan_of(tmp_path)
    assert kept(prepared) == {"step-8", "step-7", "step-6", "step-5"}
    assert prepared.found["step-7"].entry.why == "data is cut short"
    assert all(prepared.found[n].entry.checked for n in ("step-6", "step-5"))
    assert not prepared.plan.broken


def test_only_what_is_kept_is_opened(tmp_path: Path) -> None:
    for step in range(1, 31):
        save(tmp_path, f"step-{step}", step, (40 - step) * HOUR)
    small = JudgedFormat()
    plan_of(tmp_path, Policy(keep_last=2, keep_every=10), small)
    assert sorted(small.opened) == ["step-10", "step-20", "step-29", "step-30"]


def test_what_has_passed_is_not_opened_again(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, f"checkpoint-{step}", step * 100, (10 - step) * HOUR)
    policy = Policy(keep_last=3)
    first = plan_of(tmp_path, policy)
    remember(first)
    small = JudgedFormat()
    again = plan_of(tmp_path, policy, small)
    assert small.opened.count("checkpoint-6") == 0
    assert [d.reasons for d in again.plan.keep] == [d.reasons for d in first.plan.keep]
    looked = {e.entry.name: str(e.entry.looked) for e in again.found.values()}
    assert set(looked.values()) == {"headers", "unchanged"}  # content shows the steps
    assert {name for name in looked if looked[name] == "unchanged"} == kept(first)
    assert {str(d.entry.looked) for d in first.plan.keep} == {"structure"}
    assert dropped(again) == dropped(first)
    # A file that was touched is checked again; a cache that cannot be read costs time alone.
    os.utime(tmp_path / "checkpoint-6" / MARKER, (NOW - 60, NOW - 60))
    (tmp_path / "checkpoint-5" / MARKER).write_text("{")
    small = JudgedFormat()
    changed = plan_of(tmp_path, policy, small)
    assert small.opened.count("checkpoint-6") == 1
    assert changed.found["checkpoint-5"].entry.entry_class is EntryClass.CORRUPT
    for text in (
        "",
        "{",
        "[]",
        '{"schema": "ftckpt.passed/2", "passed": {"checkpoint-4": [1, 2]}}',
    ):
        (tmp_path / ".ftckpt/passed.json").write_text(text)
        assert kept(plan_of(tmp_path, policy)) == kept(changed)


def test_a_large_root_is_looked_at_by_its_names(tmp_path: Path) -> None:
    for step in range(1, 9):
        save(tmp_path, f"step-{step}", step, (10 - step) * HOUR)
    exact = plan_of(tmp_path, most_files=6)
    assert len(exact.plan.drop) == 6
    (note,) = exact.plan.notes
    assert "--apply first reads step-8 (28 bytes)" in note
    assert all(d.frees is not None for d in exact.plan.drop)
    rough = plan_of(tmp_path, most_files=5)
    assert dropped(rough) == dropped(exact)
    assert all(d.frees is None and d.entry.contents is None for d in rough.plan.drop)
    assert rough.plan.notes[0].startswith("more than 5 files of what goes were not listed")


def test_a_large_checkpoint_is_planned_by_a_few_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 7):
        save(tmp_path, f"step-{step}", step, 0)
        for number in range(40):
            (tmp_path / f"step-{step}/shard-{number}").touch()
        old(tmp_path / f"step-{step}", (10 - step) * HOUR)
    os.remove(tmp_path / "step-5" / MARKER)
    (tmp_path / "step-5" / DATA).touch()
    seal(tmp_path, "step-4", PassedCheck("content", "crc32", "2026-01-31T12:00:00Z"))
    (tmp_path / "step-3/.ftckpt").mkdir()
    (tmp_path / "step-3/.ftckpt/transfer.json").touch()
    whole = plan_of(tmp_path, sizes=True)
    listed: list[str] = []
    names = LocalStore.names

    def counted(store: LocalStore, path: str = "", most: int | None = None) -> Any:
        listed.extend([path] if most is None and path != ".ftckpt/verdicts" else [])
        return names(store, path, most)

    monkeypatch.setattr(LocalStore, "names", counted)
    monkeypatch.setattr("ftckpt.discovery.listing.FEW", 8)
    assert plan_of(tmp_path, sizes=True).plan == whole.plan
    assert listed == []
    # Two go, of 41 files each. Nine of each were seen; more are counted only where that matters.
    for most, counted_in in ((17, 0), (40, 1), (81, 2), (82, 2)):
        listed.clear()
        rough = plan_of(tmp_path, most_files=most)
        assert dropped(rough) == ["step-1", "step-2"]
        assert len(listed) == counted_in
        assert any("not listed" in note for note in rough.plan.notes) is (most < 82)


def test_what_status_has_read_is_not_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 9):
        save(tmp_path, f"step-{step}", step, (10 - step) * HOUR, "torn" if step == 7 else "good")
        (tmp_path / f"step-{step}/metrics.json").write_text(f'{{"loss": {abs(step - 3)}}}')
    seal(tmp_path, "step-4", PassedCheck("content", "crc32", "2026-01-31T12:00:00Z"))
    policy = Policy(keep_last=1, keep_best=1, metric=Metric.parse("min:loss"))

    def bases(root: Root, child: Child) -> tuple[str, ...]:
        if child.candidate.path == "step-5":
            raise CorruptError("its index is damaged")
        return ("step-1",) if child.candidate.path == "step-8" else ()

    wanted = plan_of(tmp_path, policy, bases=bases, sizes=True)
    assert kept(wanted) == {"step-1", "step-3", "step-4", "step-5", "step-7", "step-8"}
    place, small = opening.locate(str(tmp_path), StoreOptions()), JudgedFormat()
    runs = [
        survey(root, ScanOptions([small], NOW)).run for root in opening.open_runs(place, [small])
    ]
    listed: list[str] = []
    scan = LocalStore._scan

    def counted(store: LocalStore, full: str, path: str) -> Any:
        listed.append(path)
        return scan(store, full, path)

    monkeypatch.setattr(LocalStore, "_scan", counted)
    again = plan_of(tmp_path, policy, small, bases=bases, runs=runs)
    assert again.plan == wanted.plan
    assert "step-8" in listed  # it is opened
    assert not set(listed) & {"", "step-2", "step-6"}


@pytest.mark.parametrize(("wrong", "kind"), [(1, EntryClass.COMMITTED), (2, EntryClass.CORRUPT)])
def test_what_a_damaged_delta_stands_upon_is_asked_twice(
    tmp_path: Path, wrong: int, kind: EntryClass
) -> None:
    for step in range(1, 7):
        save(tmp_path, f"step-{step}", step, (10 - step) * HOUR)
    asked: list[str] = []

    def bases(root: Root, child: Child) -> tuple[str, ...]:
        if child.candidate.path != "step-6":
            return ()
        asked.append(child.candidate.path)
        if len(asked) <= wrong:
            raise CorruptError("its index is damaged")
        return ("step-1",)

    prepared = plan_of(tmp_path, bases=bases)
    assert prepared.found["step-6"].entry.entry_class is kind
    assert ("step-1" in kept(prepared)) is (wrong == 1)


def test_files_are_asked_about_only_where_that_says_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 21):
        save(tmp_path, f"step-{step}", step, (40 - step) * HOUR)
        for number in range(300):
            (tmp_path / f"step-{step}/shard-{number}").touch()
        old(tmp_path / f"step-{step}", (40 - step) * HOUR)
    asked: list[str] = []
    listed: list[str] = []
    stat, scan = LocalStore.stat, LocalStore._scan

    def counted_stat(store: LocalStore, path: str) -> Any:
        asked.append(path)
        return stat(store, path)

    def counted_scan(store: LocalStore, full: str, path: str) -> Any:
        listed.append(path)
        return scan(store, full, path)

    monkeypatch.setattr(LocalStore, "stat", counted_stat)
    monkeypatch.setattr(LocalStore, "_scan", counted_scan)
    # One goes, nineteen stay without being checked: there is no rule that could let go of more.
    plan_of(tmp_path, Policy())
    assert len(asked) < 20 * 25
    assert [p for p in listed if p.startswith("step-")] == []
    assert len(entries_of(tmp_path, Policy())) == 20


def test_names_that_lie_are_put_right_by_content(tmp_path: Path) -> None:
    # The trainer numbers its epochs; the content says the step.
    for epoch in range(1, 13):
        save(tmp_path, f"checkpoint-{epoch}", epoch * 500, (20 - epoch) * HOUR)
    prepared = plan_of(tmp_path, Policy(keep_last=2, keep_every=2000))
    assert kept(prepared) == {f"checkpoint-{e}" for e in (4, 8, 11, 12)}


def test_a_name_without_a_step_is_read(tmp_path: Path) -> None:
    for name, step in (("warm-up", 5), ("model", 300), ("last", 300), ("no-idea", None)):
        save(tmp_path, name, step, 5 * HOUR if name == "warm-up" else HOUR)
    for step in (100, 200, 300):
        save(tmp_path, f"step-{step}", step, (4 - step / 100) * HOUR)
    entries = entries_of(tmp_path)
    assert entries["warm-up"].step == 5
    assert entries["last"].named
    prepared = plan_of(tmp_path)
    # Same step, chosen together; what a person may have named is not counted, and stays.
    assert kept(prepared) == {"step-300", "step-200", "model", "last", "no-idea", "warm-up"}


def test_what_comes_later_does_not_make_a_save_younger(tmp_path: Path) -> None:
    save(tmp_path, "step-1", 1, 3 * DAY)
    seal(tmp_path, "step-1")
    (tmp_path / "step-1/metrics.json").write_text("{}")
    save(tmp_path, "step-2", 2, 2 * DAY)
    assert entries_of(tmp_path)["step-1"].time == pytest.approx(NOW - 3 * DAY, abs=1e-3)


def seal(root: Path, name: str, *checks: PassedCheck) -> None:
    write_manifest(root / name, *checks)


def test_the_newest_verified_stays(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, f"step-{step}", step, (10 - step) * HOUR)
    content = PassedCheck("content", "crc32", "2026-01-31T12:00:00Z")
    seal(tmp_path, "step-1", content)
    seal(tmp_path, "step-2", content)
    seal(tmp_path, "step-3", PassedCheck("structure", "none", "2026-01-31T12:00:00Z"))
    seal(tmp_path, "step-4")
    (tmp_path / "step-5/ftckpt.manifest.json").write_text("{")
    prepared = plan_of(tmp_path)
    assert kept(prepared) == {"step-7", "step-6", "step-2"}
    assert prepared.found["step-2"].entry.verified


def test_pointers_of_every_kind_hold(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, f"global_step{step}", step, (10 - step) * HOUR)
    (tmp_path / "latest").write_text("global_step1\n")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "best").symlink_to("global_step3")
    prepared = plan_of(tmp_path)
    assert kept(prepared) >= {"global_step1", "global_step2", "global_step3"}
    assert dropped(prepared) == ["global_step4", "global_step5"]
    assert not any("which is not there" in note for note in prepared.plan.notes)


def test_a_pointer_to_nothing_is_said(tmp_path: Path) -> None:
    save(tmp_path, "step-1", 1, HOUR)
    (tmp_path / "latest").write_text("step-9")
    assert "latest says 'step-9', which is not there" in plan_of(tmp_path).plan.notes[0]


def test_a_pointer_to_what_the_listing_does_not_show_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, f"step-{step}", step, HOUR)
    (tmp_path / "latest").write_text("step-4")
    children = LocalStore.children

    def short(store: LocalStore, path: str = "") -> Any:
        return [e for e in children(store, path) if e.path != "step-4"]

    monkeypatch.setattr(LocalStore, "children", short)
    with pytest.raises(UnavailableError, match="does not show step-4"):
        plan_of(tmp_path)


def test_pins_leases_and_tags_are_seen(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, f"step-{step}", step, (10 - step) * HOUR)
    root = read(tmp_path)
    pins.pin(root, "step-1", owner="alice@host", reason="figure 3", now=NOW)
    leases.take(root, "step-2", holder="node7:4711", now=NOW, seconds=60)
    leases.take(root, "step-3", holder="node8:1", now=NOW - 120, seconds=60)
    tags.tag(root, "step-4", "milestone", owner="alice@host", now=NOW)
    prepared = plan_of(tmp_path, Policy(keep_last=2, keep_tags=("milestone",)))
    assert dropped(prepared) == ["step-3", "step-5"]
    assert ".ftckpt" not in prepared.found


def test_a_link_in_the_place_of_our_folder_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "root", "step-1", 1, HOUR)
    (tmp_path / "outside").mkdir()
    (tmp_path / "root/.ftckpt").symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeError):
        plan_of(tmp_path / "root")


def test_an_unreadable_one_stops_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 5):
        save(tmp_path, f"step-{step}", step, HOUR)
    names = LocalStore.names

    def failing(store: LocalStore, path: str = "", most: int | None = None) -> Any:
        if path == "step-2":
            raise UnavailableError("the disk does not answer")
        return names(store, path, most)

    monkeypatch.setattr(LocalStore, "names", failing)
    with pytest.raises(UnavailableError):
        plan_of(tmp_path)


@pytest.mark.parametrize("gone", ["step-1", "step-4"])
def test_one_that_goes_meanwhile_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    # A trainer that rotates removes it between the two looks, whether it was to stay or to go.
    for step in range(1, 5):
        save(tmp_path, f"step-{step}", step, (10 - step) * HOUR)
    walk = LocalStore.walk

    def rotating(store: LocalStore, path: str = "") -> Any:
        if path == gone and (tmp_path / gone).exists():
            (tmp_path / gone / MARKER).unlink()
            (tmp_path / gone).rmdir()
        return walk(store, path)

    monkeypatch.setattr(LocalStore, "walk", rotating)
    prepared = plan_of(tmp_path)
    assert gone not in prepared.found
    assert not prepared.plan.broken
    assert len([d for d in prepared.plan.keep if d.entry.checked]) == 2


def test_runs_under_one_place_are_groups(tmp_path: Path) -> None:
    for run in ("alpha", "beta"):
        for step in range(1, 5):
            save(tmp_path / run, f"step-{step}", step, (10 - step) * HOUR)
    pins.pin(read(tmp_path / "alpha"), "step-1", owner="me", reason="first", now=NOW)
    prepared = plan_of(tmp_path)
    assert dropped(prepared) == ["beta/step-1", "alpha/step-2", "beta/step-2"]
    assert set(prepared.roots) == {"alpha", "beta"}


def test_nothing_known_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(NotFoundError) as error:
        plan_of(tmp_path)
    assert error.value.exit_code is ExitCode.NOT_FOUND


def test_what_goes_is_identified_by_every_file(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, f"step-{step}", step, (10 - step) * HOUR)
    os.link(tmp_path / "step-1" / MARKER, tmp_path / "step-2" / "same")
    size = (tmp_path / "step-1" / MARKER).stat().st_size
    prepared = plan_of(tmp_path)
    first, second = (prepared.found[n].entry.contents for n in ("step-1", "step-2"))
    assert first is not None
    assert second is not None
    assert (first.files, second.files) == (1, 2)
    assert (first.nbytes, first.unshared) == (size, 0)
    # The linked file is freed once, with the second of its names.
    assert [d.frees for d in prepared.plan.drop] == [0, 2 * size]
    os.utime(tmp_path / "step-1" / MARKER, (NOW - 7, NOW - 7))
    (tmp_path / "step-2" / "more").touch()
    again = plan_of(tmp_path, sizes=True)
    for name, before in (("step-1", first), ("step-2", second)):
        contents = again.found[name].entry.contents
        assert contents is not None
        assert contents.fingerprint != before.fingerprint
    assert all(found.entry.contents is not None for found in again.found.values())


def test_space_is_freed_only_as_far_as_asked(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, f"step-{step}", step, (10 - step) * HOUR)
        (tmp_path / f"step-{step}" / "blob").write_bytes(bytes(1000))
        old(tmp_path / f"step-{step}", (10 - step) * HOUR)
    prepared = plan_of(tmp_path, Policy(keep_last=2, reclaim=1500))
    assert dropped(prepared) == ["step-1", "step-2"]
    assert prepared.plan.frees > 2000
    assert [d.entry.name for d in prepared.plan.keep if d.reasons[0].rule == "enough-freed"] == [
        "step-5", "step-4", "step-3"
    ]  # fmt: skip


def test_bases_are_kept_with_their_deltas(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, f"step-{step}", step, (10 - step) * HOUR)
    upon = {"step-5": ["step-2"], "step-2": ["step-1"]}
    prepared = plan_of(tmp_path, bases=lambda root, child: upon.get(child.candidate.path, []))
    assert dropped(prepared) == ["step-3"]


def test_the_best_are_found_by_what_lies_beside_them(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5), (5, 2.75)):
        save(tmp_path, f"step-{step}", step, (10 - step) * HOUR)
        (tmp_path / f"step-{step}" / "metrics.json").write_text(f'{{"loss": {loss}}}')
    prepared = plan_of(tmp_path, Policy(keep_best=1, metric=Metric("loss", largest=False)))
    assert kept(prepared) == {"step-5", "step-2"}


def test_planning_writes_nothing(tmp_path: Path) -> None:
    for step in range(1, 5):
        save(tmp_path, f"step-{step}", step, (10 - step) * HOUR)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    plan_of(tmp_path)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_a_memory_root_is_walked_once_an_entry() -> None:
    from ftckpt.storage.memory import MemoryStore

    store = MemoryStore("memory://retention-reading")
    for step in range(1, 5):
        store.put(f"step-{step}/marker", b'{"step": %d, "state": "good"}' % step)
        store.put(f"step-{step}/deep/blob", bytes(10))
    place = opening.locate("memory://retention-reading", StoreOptions())
    prepared = prepare(place, [JudgedFormat()], KEEP_2, time.time() + 60)
    assert dropped(prepared) == ["step-1", "step-2"]
    assert all(found.entry.contents is not None for found in prepared.found.values())


def test_an_error_of_the_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FtckptError):
        plan_of(tmp_path / "absent")
