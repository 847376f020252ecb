"""Old milestones keep their weights alone: proven first, shown by one act, and never the last."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ftckpt.discovery import resolve as opening
from ftckpt.errors import ExitCode, NoResourceError, RefusedError
from ftckpt.formats.catalog import FORMATS
from ftckpt.manifest import ThinnedFrom
from ftckpt.manifest.locate import find
from ftckpt.manifest.seal import seal
from ftckpt.operations.thinning import WeightsAlone
from ftckpt.own_files import MANIFEST
from ftckpt.retention.apply.purge import purge, undelete
from ftckpt.retention.apply.thin import thin
from ftckpt.retention.document import dump_plan, load_plan
from ftckpt.retention.policy import Policy
from ftckpt.retention.records import pins, tags
from ftckpt.retention.scan.entry import ScannedEntry
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.source import Source
from tests import campaign
from tests.builders.checkpoints import open_checkpoint
from tests.killing import KILLED, run_until
from tests.retention.carrying import DAY, NOW, names_in, saved
from tests.retention.thinning import gc, place_of, plan_of, save, shown, thin_of

THIN = {100: "step-100.ftckpt-weights", 200: "step-200.ftckpt-weights"}
AFTER = {*THIN.values(), "step-300", "step-400"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    for step in (100, 200, 300, 400):
        save(path, step)
    return path


def test_old_milestones_keep_their_weights_and_the_whole_ones_can_be_had_back(root: Path) -> None:
    before = saved(root)
    plan, thinned = gc(root)
    assert [d.entry.name for d in plan.thin] == ["step-100", "step-200"]
    assert thinned.code is ExitCode.OK
    assert names_in(root) == AFTER
    assert 0 < thinned.won <= plan.wins
    for step, name in THIN.items():
        whole, weights = before[f"step-{step}/model.safetensors"], root / name
        assert open_checkpoint(weights).tensors.keys() == {"w"}
        data = next(weights.glob("*.safetensors")).read_bytes()
        assert isinstance(whole[3], bytes)
        assert data[-1024:] == whole[3][-1024:]
        manifest = find(Source.directory(open_store(str(weights), StoreOptions())))
        assert manifest is not None
        assert manifest.thinned is not None
        assert manifest.thinned.name == f"step-{step}"
        assert manifest.thinned.left[0].startswith("2 tensors of optimizer")
    # The same rules find nothing more to do, and keep what is there for the same reasons.
    again = plan_of(root, now=NOW + DAY)
    assert not again.order
    assert not again.thin
    kept = {d.entry.name: [r.rule for r in d.reasons] for d in again.keep}
    assert kept[THIN[100]] == ["keep-every"]
    back = undelete(
        place_of(root), FORMATS, ["step-100", "step-200"], actor="tester", now=lambda: NOW
    )
    assert back.code is ExitCode.OK
    assert {k: v for k, v in saved(root).items() if ".ftckpt-weights" not in k} == before
    assert shown(root) == {s: [f"step-{s}"] for s in (100, 200, 300, 400)}

    # What was written is used again.
    def not_again(*_: object) -> int:
        raise AssertionError("the weights are there")

    assert thin_of(root, plan_of(root), take=not_again).code is ExitCode.OK
    assert names_in(root) == AFTER
    purged = purge(place_of(root), FORMATS, actor="tester", now=lambda: NOW + 2 * DAY)
    assert purged.code is ExitCode.OK
    assert shown(root) == {s: [THIN.get(s, f"step-{s}")] for s in (100, 200, 300, 400)}


def test_killed_at_any_change_a_reader_finds_one_checkpoint_of_each_step(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    for step in (100, 300, 400):
        save(first, step)
    root = tmp_path / "run"
    stride = campaign.examples(5, 1)
    tried = 0
    for point in range(1, 1000, stride):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(first, root)
        plan = plan_of(root)

        def work(plan: object = plan) -> None:
            assert thin_of(root, plan).code is ExitCode.OK  # type: ignore[arg-type]

        code = run_until(work, point)
        seen = shown(root)
        assert {s: len(names) for s, names in seen.items()} == {100: 1, 300: 1, 400: 1}
        later = NOW + 3600  # the lease of the killed one is over
        again = plan_of(root, now=later)
        assert thin_of(root, again, later).code is ExitCode.OK
        assert shown(root)[100] == [THIN[100]]
        assert open_checkpoint(root / THIN[100]).tensors.keys() == {"w"}
        if code != KILLED:
            break
        tried += 1
    assert tried > 5, "hardly anything was tried"


def test_a_full_disk_leaves_it_whole_and_nothing_behind(root: Path) -> None:
    plan = plan_of(root)
    for point in (0, 1, 2, 3):
        left = point
        with pytest.MonkeyPatch.context() as patch:
            for name in ("write", "pwrite", "ftruncate", "posix_fallocate"):
                real = getattr(os, name)

                def call(*args: object, real: Callable[..., int] = real) -> int:
                    nonlocal left
                    left -= 1
                    if left < 0:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    return real(*args)

                patch.setattr(os, name, call)
            thinned = thin_of(root, plan)
        assert thinned.code is ExitCode.NO_RESOURCE
        assert {type(e) for e in thinned.failed.values()} == {NoResourceError}
        assert names_in(root) == {"step-100", "step-200", "step-300", "step-400"}
        # What was written is not left to fill the disk further.
        assert not [p for p in root.rglob("*") if "staging" in str(p)], point
    assert thin_of(root, plan_of(root, now=NOW + 3600), NOW + 3600).code is ExitCode.OK
    assert names_in(root) == AFTER


def test_a_damaged_one_is_never_thinned_and_told(root: Path) -> None:
    with seal_of(root / "step-100"):
        pass
    data = root / "step-100/optimizer/optimizer.safetensors"
    then = data.stat().st_mtime
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1  # in what would be left out, so that nobody would look at it again
    data.write_bytes(raw)
    os.utime(data, (then, then))
    _, thinned = gc(root)
    assert thinned.code is ExitCode.PARTIAL
    assert thinned.failed["step-100"].exit_code is ExitCode.CORRUPT
    assert names_in(root) == {"step-100", THIN[200], "step-300", "step-400"}


class seal_of:
    """Seals a checkpoint without making it younger."""

    def __init__(self, path: Path) -> None:
        then = path.stat().st_mtime
        seal(open_checkpoint(path))
        os.utime(path / "ftckpt.manifest.json", (then, then))
        os.utime(path, (then, then))

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_what_is_held_stays_whole(root: Path) -> None:
    place = opening.open_root(place_of(root), FORMATS)
    pins.pin(place, "step-100", owner="alice", reason="to go back to", now=NOW)
    (root / "latest").write_text("step-200")
    plan = plan_of(root)
    assert not plan.thin
    # Pinned after the plan was made.
    (root / "latest").unlink()
    plan = plan_of(root)
    assert [d.entry.name for d in plan.thin] == ["step-200"]
    pins.pin(place, "step-200", owner="alice", reason="that one too", now=NOW)
    thinned = thin_of(root, plan)
    assert thinned.code is ExitCode.REFUSED
    assert names_in(root) == {"step-100", "step-200", "step-300", "step-400"}


def test_pinned_while_its_weights_are_written_it_stays_whole(root: Path) -> None:
    place = opening.open_root(place_of(root), FORMATS)
    real = WeightsAlone().take

    def take(found, path, record):  # type: ignore[no-untyped-def]
        nbytes = real(found, path, record)
        pins.pin(place, record.name, owner="alice", reason="now", now=NOW)
        return nbytes

    thinned = thin_of(root, plan_of(root), take=take)
    assert thinned.code is ExitCode.REFUSED
    assert shown(root) == {s: [f"step-{s}"] for s in (100, 200, 300, 400)}


def test_saved_again_while_its_weights_are_written_it_stays_whole(root: Path) -> None:
    real = WeightsAlone().take

    def take(found, path, record):  # type: ignore[no-untyped-def]
        nbytes = real(found, path, record)
        shutil.rmtree(root / record.name)
        save(root, record.step, NOW + 60)
        return nbytes

    thinned = thin_of(root, plan_of(root), take=take)
    assert thinned.code is ExitCode.REFUSED
    assert shown(root) == {s: [f"step-{s}"] for s in (100, 200, 300, 400)}
    # The next run takes the weights of what stands there now, and the old ones into the trash.
    later = NOW + 2 * DAY
    thinned = thin_of(root, plan_of(root, now=later), later)
    assert thinned.code is ExitCode.OK
    assert any("another save" in note for note in thinned.notes)
    assert names_in(root) == AFTER


def test_others_that_go_meanwhile_keep_the_last_ones_whole(root: Path) -> None:
    real = WeightsAlone().take

    def take(found, path, record):  # type: ignore[no-untyped-def]
        nbytes = real(found, path, record)
        shutil.rmtree(root / "step-300", ignore_errors=True)  # a trainer rotates
        return nbytes

    thinned = thin_of(root, plan_of(root), take=take)
    # Two whole ones are left beside the first, and one beside the second.
    assert {name: type(e) for name, e in thinned.failed.items()} == {"step-200": RefusedError}
    assert shown(root) == {100: [THIN[100]], 200: ["step-200"], 400: ["step-400"]}


def test_the_last_good_ones_are_never_thinned(root: Path) -> None:
    # Two whole ones must be left for a run to go on from, whatever was asked for.
    policy = Policy(keep_every=100, thin_beyond=1)
    assert [d.entry.name for d in plan_of(root, policy).thin] == ["step-100", "step-200"]
    policy = Policy(keep_every=100, thin_after=0.0, min_survivors=3)
    assert [d.entry.name for d in plan_of(root, policy).thin] == ["step-100"]
    shutil.rmtree(root / "step-400")
    shutil.rmtree(root / "step-300")
    assert not plan_of(root, Policy(keep_every=100, thin_beyond=1)).thin


def test_two_at_once(root: Path) -> None:
    plan = plan_of(root)
    done = []
    threads = [threading.Thread(target=lambda: done.append(thin_of(root, plan))) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sum(len(one.thinned) for one in done) <= 2
    assert {s: len(n) for s, n in shown(root).items()} == {100: 1, 200: 1, 300: 1, 400: 1}
    assert thin_of(root, plan_of(root, now=NOW + 3600), NOW + 3600).code is ExitCode.OK
    assert names_in(root) == AFTER


def test_a_tag_and_a_metric_outlive_the_optimizer(root: Path) -> None:
    place = opening.open_root(place_of(root), FORMATS)
    tags.tag(place, "step-100", "milestone", owner="alice", now=NOW)
    for step in (100, 200, 300, 400):
        (root / f"step-{step}/metrics.json").write_text(json.dumps({"loss": abs(step - 200)}))
        file = root / f"step-{step}/metrics.json"
        then = (root / f"step-{step}/model.safetensors").stat().st_mtime
        os.utime(file, (then, then))
    from ftckpt.retention.policy import Metric

    policy = Policy(
        keep_last=2, keep_best=1, metric=Metric("loss", False), keep_tags=("milestone",),
        thin_after=DAY,
    )  # fmt: skip
    _, thinned = gc(root, policy)
    assert thinned.code is ExitCode.OK
    assert names_in(root) == AFTER
    again = plan_of(root, policy, NOW + DAY)
    assert not again.order
    why = {d.entry.name: [r.rule for r in d.reasons] for d in again.keep}
    assert why[THIN[100]] == ["keep-tag"]
    assert why[THIN[200]] == ["keep-best"]


def test_what_has_little_beside_its_weights_is_named_and_stays(root: Path) -> None:
    shutil.rmtree(root / "step-100/optimizer")
    plan = plan_of(root)
    assert [d.entry.name for d in plan.thin] == ["step-200"]
    why = {d.entry.name: [str(r) for r in d.reasons] for d in plan.decisions}
    assert why["step-100"][-1] == "whole: there is little in it beside its weights"


def test_a_copy_under_another_name_is_still_no_checkpoint_to_go_on_from(root: Path) -> None:
    gc(root)
    for path in root.iterdir():
        if path.name in ("step-300", "step-400"):
            shutil.rmtree(path)
    (root / THIN[200]).rename(root / "step-500")
    seal(open_checkpoint(root / "step-500"))
    plan = plan_of(root, Policy(keep_last=1, min_survivors=1))
    assert {d.entry.name: bool(d.entry.thinned) for d in plan.keep if d.entry.checked} == {
        THIN[100]: True,
        "step-500": True,
    }
    (root / "step-500/ftckpt.manifest.json").unlink()
    assert shown(root) == {100: [THIN[100]], 500: ["step-500"]}


def test_the_plan_as_a_document(root: Path) -> None:
    plan = plan_of(root)
    again = load_plan(json.dumps(dump_plan(plan)).encode(), "plan.json")
    assert again == plan
    assert [d.entry.name for d in again.thin] == ["step-100", "step-200"]
    assert thin_of(root, again).code is ExitCode.OK
    assert names_in(root) == AFTER


@pytest.mark.parametrize("damage", ["flip", "remove", "manifest"])
def test_weights_that_a_killed_run_left_are_read_again(root: Path, damage: str) -> None:
    def dies(*_: object) -> None:
        raise RefusedError("killed here")

    before = (root / "step-100/model.safetensors").read_bytes()
    plan = plan_of(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[thin.__module__]._Thinning, "_swap", dies)
        assert set(thin_of(root, plan).failed) == {"step-100", "step-200"}
    left = next((root / THIN[100]).glob("*.safetensors"))
    if damage == "flip":
        with left.open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"XXXXXXXX")
    elif damage == "remove":
        left.unlink()
    else:
        (left.parent / MANIFEST).write_bytes(b"{}")
    thinned = thin_of(root, plan_of(root, now=NOW + 3600), NOW + 3600, purge_now=True)
    if damage == "manifest":
        assert set(thinned.failed) == {"step-100"}
        assert (root / "step-100/model.safetensors").read_bytes() == before
        return
    assert thinned.code is ExitCode.OK
    assert "is damaged" in thinned.notes[0]
    assert next((root / THIN[100]).glob("*.safetensors")).read_bytes()[-1024:] == before[-1024:]


def test_weights_that_go_after_they_were_made_keep_it_whole(root: Path) -> None:
    def take(found: ScannedEntry, path: str, record: ThinnedFrom) -> int:
        done = WeightsAlone().take(found, path, record)
        os.truncate(next((root / f"{found.entry.name}.ftckpt-weights").glob("*.safetensors")), 9)
        return done

    thinned = thin_of(root, plan_of(root), take=take)
    assert set(thinned.failed) == {"step-100", "step-200"}
    assert {"step-100", "step-200"} <= names_in(root)
