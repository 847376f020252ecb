"""A manifest of which all data are gone: told as what it is, and dropped from object stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftckpt.discovery import resolve as opening
from ftckpt.discovery.candidates import look
from ftckpt.discovery.listing import open_part
from ftckpt.errors import CorruptError, ExitCode, NotFoundError
from ftckpt.manifest import seal as sealing
from ftckpt.manifest.seal import seal
from ftckpt.own_files import MANIFEST, SUFFIX
from ftckpt.retention.apply.prepare import prepare
from ftckpt.retention.apply.purge import purge
from ftckpt.retention.apply.run import apply
from ftckpt.retention.policy import Policy
from ftckpt.retention.policy.plan import RetentionPlan
from ftckpt.retention.scan.entries import EntryClass
from ftckpt.retention.scan.entry import ScannedEntry
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from tests.builders.checkpoints import save_dcp
from tests.builders.small_format import Small
from tests.json_run import ftckpt_json
from tests.retention.carrying import Shapes
from tests.retention.remote_roots import (
    DAY,
    NOW,
    TimedStore,
    newest,
    place_of,
    planned,
    save,
    saves,
)
from tests.servers.places import QUICK

FORMATS = [Shapes()]


def sealed_in(store: TimedStore, name: str) -> bytes:
    """Seal a checkpoint of a root; return its manifest."""
    root = opening.open_root(place_of(store), FORMATS)
    candidate = next(c for c in root.candidates if c.path == name)
    child = root.recognise(candidate)
    assert child is not None
    report = seal(open_part(root.store, child.part))
    return report.manifest.dump()


def left_alone(step: int = 1) -> TimedStore:
    """Return a root in which a killed seal has left the manifest of a step alone, long ago."""
    store = TimedStore()
    saves(store, (1, 2, 3))  # the last of them a day and an hour before now
    store.now = NOW - 2 * DAY
    sealed_in(store, f"step-{step}")
    store.delete([e.path for e in store.walk(f"step-{step}") if not e.path.endswith(MANIFEST)])
    store.now = NOW
    return store


def found_in(store: TimedStore, name: str, now: float = NOW) -> ScannedEntry:
    return planned(store, now=now).found[name]


def test_gc_drops_it_once_it_is_a_day_old() -> None:
    store = left_alone()
    young = found_in(store, "step-1", NOW - 1.5 * DAY)
    assert young.entry.entry_class is EntryClass.STAGING
    found = found_in(store, "step-1")
    assert found.entry.entry_class is EntryClass.ABANDONED
    assert found.entry.why == "a manifest stands alone: the file described there is gone"
    plan = planned(store).plan
    assert plan.order == ("step-1",)
    applied = apply(plan, place_of(store), [Small()], actor="me", now=lambda: NOW)
    assert applied.code is ExitCode.OK
    # Dropped and not reclaimed, it is told once, as trash; and a second plan has nothing to do.
    again = planned(store)
    assert [f.entry.entry_class for n, f in again.found.items() if n.endswith("step-1")] == [
        EntryClass.TRASH
    ]
    assert again.plan.order == ()
    purge(place_of(store), [Small()], actor="me", now=lambda: NOW + 2 * DAY)
    with pytest.raises(NotFoundError):
        store.walk("step-1")
    assert {e.path.partition("/")[0] for e in store.walk()} == {"step-2", "step-3", ".ftckpt"}


def test_a_restart_takes_the_one_before_and_says_why() -> None:
    store = left_alone(3)
    root = opening.open_root(place_of(store), FORMATS)
    candidate = next(c for c in root.candidates if c.path == "step-3")
    looked = look(root, candidate)
    assert looked is not None
    assert isinstance(looked.error, CorruptError)
    assert "a manifest stands alone" in looked.error.message
    assert newest(store) == "step-2"


def test_what_a_listing_does_not_show_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = left_alone()
    store.now = NOW - 3 * DAY
    save(store, "step-1", 1)
    store.now = NOW
    real = TimedStore.walk

    def short(self: TimedStore, path: str = "") -> list[object]:
        return [e for e in real(self, path) if e.path.endswith(MANIFEST) or "step-1" not in e.path]

    monkeypatch.setattr(TimedStore, "walk", short)
    entry = found_in(store, "step-1").entry
    assert entry.entry_class is EntryClass.FOREIGN


@pytest.mark.parametrize("data", [b"", b"{}", b"no manifest"])
def test_what_is_no_manifest_is_no_evidence(data: bytes) -> None:
    store = left_alone()
    store.now = NOW - 2 * DAY
    store.put(f"step-1/{MANIFEST}", data)
    store.now = NOW
    assert found_in(store, "step-1").entry.entry_class is EntryClass.FOREIGN


def test_it_stays_where_anything_else_stands_with_it() -> None:
    store = left_alone()
    store.now = NOW - 2 * DAY
    store.put("step-1/notes", b"mine")
    store.now = NOW
    assert found_in(store, "step-1").entry.entry_class is EntryClass.FOREIGN


def test_the_manifest_of_one_file_is_dropped_too() -> None:
    store = TimedStore()
    saves(store, (2, 3))
    store.now = NOW - 2 * DAY
    store.put("step-1.pt", json.dumps({"step": 1}).encode())
    manifest = sealed_in(store, "step-1.pt")
    store.delete(["step-1.pt"])
    store.put("model.pt" + SUFFIX, manifest)
    store.put(".model.pt.ftckpt-staging/x", b"a conversion to it is under way")
    store.now = NOW
    name = "step-1.pt" + SUFFIX
    plan = plan_at(store, NOW)
    assert plan.order == (name,)
    assert apply(plan, place_of(store), FORMATS, actor="me", now=lambda: NOW).code is ExitCode.OK
    assert plan_at(store, NOW).order == ()
    purge(place_of(store), FORMATS, actor="me", now=lambda: NOW + 2 * DAY)
    left = {e.path for e in store.walk()}
    assert name not in left
    assert "model.pt" + SUFFIX in left


def test_gc_of_a_file_that_is_there_leaves_its_manifest() -> None:
    store = TimedStore()
    saves(store, (2, 3))
    store.now = NOW - 2 * DAY
    store.put("step-1.pt", json.dumps({"step": 1}).encode())
    sealed_in(store, "step-1.pt")
    store.now = NOW
    assert "step-1.pt" + SUFFIX not in {d.entry.name for d in plan_at(store, NOW).decisions}


class Killed(BaseException):
    """A process was killed."""


@pytest.mark.parametrize("name", ["step-1", "step-1.pt"])
def test_a_seal_killed_after_its_put_while_gc_reclaims(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TimedStore()
    saves(store, (2, 3))
    store.now = NOW - 3 * DAY
    if name == "step-1":
        save(store, name, 1)
    else:
        store.put(name, json.dumps({"step": 1}).encode())
    store.now = NOW
    plan = plan_at(store, NOW)
    assert plan.order == (name,)

    def dropped(*_: object) -> None:
        done = apply(plan, place_of(store), FORMATS, actor="me", now=lambda: NOW, purge_now=True)
        assert done.code is ExitCode.OK

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(sealing, "_require_unchanged", dropped)
        patch.setattr(Source, "changed", die)
        with pytest.raises(Killed):
            sealed_in(store, name)
    record = f"{name}/{MANIFEST}" if name == "step-1" else name + SUFFIX
    assert record in {e.path for e in store.walk()}
    store.now = later = NOW + 2 * DAY
    assert plan_at(store, later).order == ()  # as with any save, until a later one was finished
    save(store, "step-4", 4)
    plan = plan_at(store, later)
    assert plan.order[0] == (name if name == "step-1" else record)
    assert "a manifest stands alone" in str(plan.decisions)
    apply(plan, place_of(store), FORMATS, actor="me", now=lambda: later, purge_now=True)
    assert record not in {e.path for e in store.walk()}
    assert plan_at(store, later).order == ()


def plan_at(store: TimedStore, now: float) -> RetentionPlan:
    return prepare(place_of(store), FORMATS, Policy(keep_last=2), now).plan


def hollowed(path: Path) -> Path:
    """Save, seal and lose all data."""
    save_dcp(path)
    ftckpt_json("seal", str(path))
    for file in path.iterdir():
        if file.name != MANIFEST:
            file.unlink()
    return path


def test_every_verb_names_it(tmp_path: Path) -> None:
    save_dcp(tmp_path / "run/step-7")
    path = hollowed(tmp_path / "run/step-9")
    for verb in ("verify", "inspect"):
        told = ftckpt_json(verb, str(path))
        assert told["result"]["code"] == 4
        assert (
            "a manifest stands alone: the 2 files described there are gone"
            in told["result"]["message"]
        )
    found = ftckpt_json("latest", str(tmp_path / "run"))
    (skipped,) = found["skipped"]
    assert (skipped["name"], skipped["path"]) == ("CORRUPT", str(path))
    plan = ftckpt_json("gc", str(tmp_path / "run"), "--keep-last", "1")
    (row,) = [d for d in plan["plan"]["decisions"] if d["name"] == "step-9"]
    # On a disk no race leaves it: a user has removed the data, and may put them back.
    assert row["entry_class"] == "FOREIGN"
    assert "a manifest stands alone" in row["why"]


@pytest.mark.s3
def test_on_s3(s3_url: str, tmp_path: Path) -> None:
    store = open_store(s3_url, QUICK)
    for step in (7, 9):
        local = save_dcp(tmp_path / f"run/step-{step}")
        for file in local.iterdir():
            store.put(f"run/step-{step}/{file.name}", file.read_bytes())
    ftckpt_json("seal", f"{s3_url}/run/step-9")
    store.delete([e.path for e in store.walk("run/step-9") if not e.path.endswith(MANIFEST)])
    told = ftckpt_json("verify", f"{s3_url}/run/step-9")
    assert told["result"]["code"] == 4
    assert "a manifest stands alone" in told["result"]["message"]
    assert ftckpt_json("latest", f"{s3_url}/run")["path"].endswith("step-7")
    plan = ftckpt_json("gc", f"{s3_url}/run", "--keep-last", "1")["plan"]
    (row,) = [d for d in plan["decisions"] if d["name"] == "step-9"]
    assert row["entry_class"] == "STAGING"
