"""Temporary files of killed runs: named as ours, and removed when nobody comes back to them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from ftckpt.errors import ExitCode, FtckptError
from ftckpt.own_files import is_leftover
from ftckpt.storage import open_store
from tests.builders.checkpoints import save_dcp
from tests.json_run import ftckpt_json
from tests.retention.carrying import DAY, NOW, apply_to, names_in, purge_in, save
from tests.servers.places import QUICK

OLD, YOUNG, DEEP = ".ftckpt-tmp-old", ".ftckpt-tmp-young", ".ftckpt/.ftckpt-tmp-deep"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    for step in (98, 99):
        save(root, f"step-{step}", step)
    (root / ".ftckpt").mkdir()
    now = min(NOW, time.time())  # the store says how old they are
    for name, age in ((OLD, 2 * DAY), (YOUNG, DAY / 2), (DEEP, 2 * DAY), ("notes", 9 * DAY)):
        (root / name).write_text("x")
        os.utime(root / name, (now - age, now - age))
    (root / ".ftckpt-tmp-link").symlink_to(root / "notes")
    os.utime(root / ".ftckpt-tmp-link", (now - 9 * DAY,) * 2, follow_symlinks=False)
    return root


@pytest.mark.parametrize("how", ["apply", "purge"])
def test_old_ones_are_removed_and_nothing_else(root: Path, how: str) -> None:
    done = apply_to(root, trash_ttl=DAY).purged if how == "apply" else purge_in(root, NOW)
    assert done is not None
    assert done.code is ExitCode.OK
    assert done.notes == (
        f"removed 2 temporary files that killed runs of ftckpt had left in {root}",
    )
    left = {p.name for p in root.iterdir()}
    assert left == {"step-98", "step-99", YOUNG, "notes", ".ftckpt", ".ftckpt-tmp-link"}
    assert not (root / DEEP).exists()
    assert names_in(root) == {"step-98", "step-99", "notes"}


def test_a_clock_that_is_ahead_removes_nothing(root: Path) -> None:
    """A writer may be about to give them their names; the store dates them."""
    for name in (OLD, YOUNG, DEEP):
        os.utime(root / name)
    assert purge_in(root, time.time() + 3 * DAY).notes == ()
    assert (root / OLD).exists()
    assert (root / DEEP).exists()


def test_one_that_cannot_be_removed_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.unlink

    def unlink(path: str, **more: int) -> None:
        if path.endswith(OLD):
            raise PermissionError(13, "no")
        real(path, **more)

    monkeypatch.setattr(os, "unlink", unlink)
    done = purge_in(root, NOW)
    assert done.code is ExitCode.OK
    assert len(done.notes) == 2
    assert "stays in" in done.notes[1]


def test_gc_and_status_name_them(tmp_path: Path) -> None:
    save_dcp(tmp_path / "run/step-1")
    (tmp_path / "run/.ftckpt-tmp-probe-1").touch()
    plan = ftckpt_json("gc", str(tmp_path / "run"), "--keep-last", "1")
    (left,) = [d for d in plan["plan"]["decisions"] if is_leftover(d["name"])]
    assert left["entry_class"] == "FOREIGN"
    assert "a run of ftckpt that was killed has left it" in left["why"]
    (run,) = ftckpt_json("status", str(tmp_path / "run"))["runs"]
    assert run["leftovers"] == [".ftckpt-tmp-probe-1"]


def test_gc_names_those_inside_a_checkpoint(tmp_path: Path) -> None:
    save_dcp(tmp_path / "run/step-1")
    (tmp_path / "run/step-1/.ftckpt-tmp-0000000000000001").touch()
    plan = ftckpt_json("gc", str(tmp_path / "run"), "--keep-last", "1")
    (note,) = [n for n in plan["plan"]["notes"] if ".ftckpt-tmp-0000000000000001" in n]
    assert str(tmp_path / "run/step-1") in note
    assert "the next seal of it removes" in note


@pytest.mark.s3
def test_the_next_probe_sweeps_up_those_before_it(s3_url: str) -> None:
    store = open_store(s3_url, QUICK)
    left = (".ftckpt-tmp-probe-0123456789abcdef", ".ftckpt-tmp-probe-1")
    others = (".ftckpt-tmp-probe", "deep/.ftckpt-tmp-probe-2", ".ftckpt-tmp-clock-1")
    for name in (*left, *others):
        store.put(name, b"")
    store.put(".ftckpt-tmp-probe-3", b"what is no probe")
    open_store(s3_url, QUICK).create("new", b"1")
    there = {entry.path for entry in store.walk()}
    assert there == {*others, ".ftckpt-tmp-probe-3", "new"}


@pytest.mark.s3
def test_probes_that_sweep_each_other_away_find_the_truth(s3_url: str) -> None:
    stores = [open_store(s3_url, QUICK) for _ in range(8)]
    barrier = threading.Barrier(len(stores))
    failed: list[FtckptError] = []

    def create(number: int) -> None:
        barrier.wait()
        try:
            stores[number].create(f"new-{number}", b"1")
        except FtckptError as error:
            failed.append(error)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(len(stores))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failed == []
    assert [store.traits.conditional_put for store in stores] == [True] * len(stores)
    there = {entry.path for entry in stores[0].walk()}
    assert there == {f"new-{n}" for n in range(len(stores))}
