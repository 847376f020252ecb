"""`ftckpt sync`: what is shipped to a tier, what counts as there, and what a kill leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import ftckpt.replication.sync
import ftckpt.replication.sync.missing
from ftckpt.errors import DeniedError
from ftckpt.replication.copy import copy
from ftckpt.replication.sync.missing import locked
from ftckpt.retention.locks import leases
from ftckpt.retention.locks.remote import beating
from ftckpt.storage import open_store
from tests.commands.latest.test_latest import flip
from tests.commands.latest.test_latest import save as torch_save
from tests.commands.saves import DAY, answer, ended, save
from tests.retention.thinning import date, safetensors
from tests.retention.thinning import gc as thin
from tests.retention.thinning import save as made_for_thinning
from tests.servers.s3 import S3Service


@pytest.fixture(scope="session")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torch saved: steps 10 to 40, and two more."""
    root = tmp_path_factory.mktemp("saves")
    for step in (9, 10, 20, 21, 30, 33, 40):
        torch_save(root / f"step-{step}", step)
    return root


@pytest.fixture
def root(saves: Path, tmp_path: Path) -> Path:
    for step in (10, 20, 30, 40):
        shutil.copytree(saves / f"step-{step}", tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    (tmp_path / "tier").mkdir()
    return tmp_path / "tier"


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty tier."""
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    return str(request.getfixturevalue("tier"))


def states(document: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["state"] for item in document["items"]}


def steps(tier: Path) -> list[str]:
    return sorted(p.name for p in tier.iterdir() if not p.name.startswith("."))


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a checkpoint that is there already is read to find that out."""

    def read(*_: Any) -> None:
        raise AssertionError("the source was read")

    monkeypatch.setattr(ftckpt.replication.sync.missing, "require_same", read)


def test_everything_is_shipped_once(
    root: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = answer("sync", str(root), place, "--dry-run")
    assert set(states(document).values()) == {"planned"}
    assert (document["missing"], document["shipped"]) == (4, 0)
    document = answer("sync", str(root), place)
    assert document["result"]["code"] == 0, document["result"]
    assert states(document) == dict.fromkeys(
        ("step-10", "step-20", "step-30", "step-40"), "shipped"
    )
    assert (document["newest"], document["missing"]) == (40, 0)
    assert {item["evidence"] for item in document["items"]} == {"crc32"}
    for step in (10, 40):
        assert ended("verify", f"{place}/step-{step}", "--level", "content") == 0
    unread(monkeypatch)
    document = answer("sync", str(root), place)
    assert set(states(document).values()) == {"there"}
    assert (document["shipped"], document["bytes"]) == (0, 0)
    found = answer("status", str(root), "--tier", place)["runs"][0]["tier"]
    assert (found["newest"]["step"], found["missing"]) == (40, [])


def test_the_rules_of_gc_choose(root: Path, saves: Path, tier: Path) -> None:
    assert ended("tag", str(root), "10", "release") == 0
    shutil.copytree(saves / "step-33", root / "step-33")
    words = ("sync", str(root), str(tier), "--every", "20", "--newest", "1", "--tag", "release")
    document = answer(*words)
    why = {item["name"]: item["why"] for item in document["items"]}
    assert why == {
        "step-10": "tagged release",
        "step-20": "nearest to step 20",
        "step-40": "nearest to step 40",
    }
    assert steps(tier) == ["step-10", "step-20", "step-40"]


def test_the_oldest_gap_comes_first(root: Path, saves: Path, tier: Path) -> None:
    shutil.copytree(saves / "step-9", root / "step-9")
    assert ended("sync", str(root), str(tier), "--newest", "2") == 0
    assert steps(tier) == ["step-30", "step-40"]
    names = [item["name"] for item in answer("sync", str(root), str(tier))["items"]]
    assert names == ["step-9", "step-10", "step-20", "step-30", "step-40"]


def test_what_is_not_good_is_not_shipped(root: Path, tier: Path) -> None:
    (root / "step-40" / ".metadata").unlink()  # a save in flight
    flip(root / "step-20")
    document = answer("sync", str(root), str(tier))
    assert document["result"]["code"] == 4
    assert "step-20 was not shipped" in document["result"]["message"]
    assert states(document) == {
        "step-10": "shipped",
        "step-20": "failed",
        "step-30": "shipped",
        "step-40": "unfinished",
    }
    assert steps(tier) == ["step-10", "step-30"]
    # What is damaged makes room for the next that the rule chooses.
    shutil.rmtree(tier)
    tier.mkdir()
    document = answer("sync", str(root), str(tier), "--newest", "2")
    assert document["result"]["code"] == 4
    assert steps(tier) == ["step-10", "step-30"]


def test_a_rule_finds_nothing_that_can_be_shipped(root: Path, tier: Path) -> None:
    for step in root.iterdir():
        (tier / step.name).mkdir()
        (tier / step.name / "other").write_text("x")
    document = answer("sync", str(root), str(tier), "--every", "10")
    assert document["result"]["code"] == 8
    assert set(states(document).values()) == {"failed"}


def test_a_save_in_flight_is_no_failure(root: Path, tier: Path) -> None:
    (root / "step-40" / ".metadata").unlink()
    document = answer("sync", str(root), str(tier))
    assert document["result"]["code"] == 0
    assert states(document)["step-40"] == "unfinished"


def test_another_checkpoint_of_the_same_name(
    root: Path, saves: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended("sync", str(root), str(tier)) == 0
    # Files that were only touched are read and found to be the same, once.
    for file in (root / "step-10").iterdir():
        os.utime(file, (1_700_000_000, 1_700_000_000))
    assert states(answer("sync", str(root), str(tier)))["step-10"] == "there"
    with monkeypatch.context() as patched:
        unread(patched)
        assert states(answer("sync", str(root), str(tier)))["step-10"] == "there"
    # The run was restarted and saved its step again: names and sizes are those of before.
    shutil.rmtree(root / "step-20")
    shutil.copytree(saves / "step-21", root / "step-20")
    before = {p.name: p.read_bytes() for p in (tier / "step-20").iterdir()}
    document = answer("sync", str(root), str(tier))
    assert document["result"]["code"] == 8
    assert "holds another checkpoint" in document["result"]["message"]
    assert states(document)["step-30"] == "there"
    assert {p.name: p.read_bytes() for p in (tier / "step-20").iterdir()} == before


def test_a_seal_that_is_older_than_the_files(
    root: Path, saves: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest that stayed while the step was saved again proves nothing about the files."""
    assert ended("seal", str(root / "step-20")) == 0
    assert ended("copy", str(root / "step-20"), f"{tier}/") == 0
    with monkeypatch.context() as patched:
        unread(patched)
        document = answer("sync", str(root), str(tier), "--every", "20", "--dry-run")
    assert states(document)["step-20"] == "there"
    for file in (saves / "step-21").iterdir():
        shutil.copyfile(file, root / "step-20" / file.name)
        os.utime(root / "step-20" / file.name, (time.time() + 10,) * 2)
    document = answer("sync", str(root), str(tier), "--every", "20")
    assert states(document)["step-20"] == "failed"
    assert document["result"]["code"] == 8


def test_a_copy_that_is_damaged(root: Path, tier: Path) -> None:
    assert ended("seal", str(root / "step-10")) == 0
    assert ended("sync", str(root), str(tier)) == 0
    data = next((tier / "step-10").glob("*.distcp"))
    os.truncate(data, data.stat().st_size - 1)
    (tier / "step-20" / ".metadata").unlink()
    document = answer("sync", str(root), str(tier))
    assert document["result"]["code"] == 4
    failed = {i["name"]: i["why"] for i in document["items"] if i["state"] == "failed"}
    assert set(failed) == {"step-10", "step-20"}
    assert "bytes, not" in failed["step-10"]
    assert ".metadata" in failed["step-20"]


def test_what_the_tier_has_dropped_stays_dropped(root: Path, tier: Path) -> None:
    assert ended("sync", str(root), str(tier)) == 0
    assert ended("gc", str(tier), "--keep-last", "2", "--apply") == 0
    document = answer("sync", str(root), str(tier))
    assert document["result"]["code"] == 0
    assert states(document) == {
        "step-10": "dropped",
        "step-20": "dropped",
        "step-30": "there",
        "step-40": "there",
    }
    assert steps(tier) == ["step-30", "step-40"]
    # What was saved after that is another one.
    for path in ((root / "step-20"), *(root / "step-20").iterdir()):
        os.utime(path, (time.time() + 60,) * 2)
    assert states(answer("sync", str(root), str(tier)))["step-20"] == "shipped"
    assert states(answer("sync", str(root), str(tier), "--again"))["step-10"] == "shipped"


def test_nothing_is_removed_on_either_side(root: Path, saves: Path, tier: Path) -> None:
    shutil.copytree(saves / "step-9", tier / "step-5")
    assert ended("sync", str(root), str(tier)) == 0
    shutil.rmtree(root / "step-10")
    assert ended("sync", str(root), str(tier)) == 0
    assert steps(tier) == ["step-10", "step-20", "step-30", "step-40", "step-5"]


def test_places_that_are_no_tier(root: Path, tier: Path, tmp_path: Path) -> None:
    gone = answer("sync", str(root), str(tmp_path / "mount"))
    assert gone["result"]["code"] == 9
    assert "no mount is missing" in gone["result"]["hint"] or "is there" in gone["result"]["hint"]
    assert not (tmp_path / "mount").exists()
    assert ended("sync", str(root), str(root)) == 8
    assert ended("sync", str(root), str(tmp_path)) == 8
    assert ended("sync", str(root), str(root / "step-10")) in (2, 8)
    assert ended("sync", f"{root}@10", str(tier)) == 2
    assert ended("sync", str(root / "step-10"), str(tier)) == 2


def test_a_delta_comes_with_its_base(root: Path, tier: Path) -> None:
    assert (
        ended("delta", "pack", str(root / "step-10"), str(root / "step-40"), str(root / "d")) == 0
    )
    shutil.rmtree(root / "step-40")
    (root / "d").rename(root / "step-40")
    document = answer("sync", str(root), str(tier), "--newest", "1")
    assert document["result"]["code"] == 0, document["result"]
    why = {item["name"]: item["why"] for item in document["items"]}
    assert why["step-10"] == "base of step-40"
    assert steps(tier) == ["step-10", "step-40"]
    shutil.rmtree(root)
    assert ended("verify", str(tier / "step-40"), "--level", "content") == 0


def test_a_second_sync_is_refused(root: Path, place: str) -> None:
    lock = locked
    with lock(_tier(place), "alice@login1", lambda text: pytest.fail(text)):
        document = answer("sync", str(root), place)
    assert document["result"]["code"] == 8
    assert "another sync is at work" in document["result"]["message"]
    assert "alice@login1" in document["result"]["message"]
    assert answer("sync", str(root), place)["shipped"] == 4
    # gc has a lock of its own, and both may work at once.
    with lock(_tier(place), "alice@login1", lambda text: pytest.fail(text)):
        assert ended("gc", place, "--keep-last", "9", "--apply") == 0


def _tier(url: str) -> Any:
    from ftckpt.discovery.roots import Root

    return Root(open_store(url), "", (), (), (), lambda _: None, {})


def test_a_lock_that_is_lost_stops_the_sync() -> None:
    beats = []

    def beat() -> None:
        beats.append(1)
        if len(beats) > 2:
            raise DeniedError("lost")

    with beating(beat, 0.001) as check:
        while len(beats) < 3:
            time.sleep(0.001)
        with pytest.raises(DeniedError, match="lost"):
            check()


@pytest.mark.s3
def test_a_service_without_conditions(
    root: Path, rclone: S3Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tests.servers.s3 import BUCKET

    rclone.enter(monkeypatch)
    url = f"s3://{BUCKET}/{tmp_path.name.replace('_', '-')}"
    document = answer("sync", str(root), url, "--newest", "1")
    assert document["result"]["code"] == 0, document["result"]
    assert answer("latest", url)["step"] == answer("latest", str(root))["step"]


def test_a_root_that_may_not_be_written(
    root: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise DeniedError("read-only")

    monkeypatch.setattr(leases, "take", refuse)
    assert answer("sync", str(root), str(tier))["shipped"] == 4
    assert not (root / ".ftckpt").exists()


def test_gc_waits_for_what_is_being_shipped(
    root: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def look(checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        plan = answer("gc", str(root), "--keep-last", "1")
        seen.append({d["name"]: d["keep"] for d in plan["plan"]["decisions"]})
        return copy(checkpoint, *args, **kwargs)

    monkeypatch.setattr(ftckpt.replication.sync, "copy", look)
    assert ended("sync", str(root), str(tier)) == 0
    assert [one["step-10"] for one in seen] == [True, False, False, False], seen
    plan = answer("gc", str(root), "--keep-last", "2")["plan"]  # the leases were given back
    assert [d["keep"] for d in plan["decisions"] if d["name"] == "step-10"] == [False]


def test_a_step_that_is_removed_meanwhile(
    root: Path, tier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove(checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        if checkpoint.source.name == "step-20":
            shutil.rmtree(root / "step-20")
        return copy(checkpoint, *args, **kwargs)

    monkeypatch.setattr(ftckpt.replication.sync, "copy", remove)
    document = answer("sync", str(root), str(tier))
    assert states(document)["step-20"] == "gone", document
    assert steps(tier) == ["step-10", "step-30", "step-40"]
    assert document["result"]["code"] == 0


def test_killed_anywhere_the_next_run_goes_on(root: Path, tier: Path) -> None:
    line = [sys.executable, "-m", "ftckpt", "sync", str(root), str(tier)]
    for wanted in (1, 2, 3):
        slow = subprocess.Popen([*line, "--limit-rate", "2KB/s"], stdout=subprocess.DEVNULL)
        while slow.poll() is None and len(list(tier.glob("*step-*"))) <= wanted:
            time.sleep(0.01)
        slow.send_signal(signal.SIGKILL)
        slow.wait()
    for name in steps(tier):  # every visible one is whole
        assert ended("verify", str(tier / name), "--level", "content") == 0
    done = subprocess.run([*line, "--json"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["missing"] == 0
    assert steps(tier) == ["step-10", "step-20", "step-30", "step-40"]
    assert not list(tier.glob(".*staging*"))
    for name in steps(tier):
        assert ended("verify", str(tier / name), "--level", "content") == 0


def test_files_that_are_checkpoints(tmp_path: Path, tier: Path) -> None:
    root = tmp_path / "run"
    for step in (100, 200, 300):
        save(root, f"checkpoint-{step}", DAY)
    assert answer("sync", str(root), str(tier), "--every", "100")["shipped"] == 3
    assert set(states(answer("sync", str(root), str(tier))).values()) == {"there"}


def test_the_text(root: Path, tier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ftckpt.commands.cli import app

    (root / "step-40" / ".metadata").unlink()
    with pytest.raises(SystemExit) as left:
        app.main(["sync", str(root), str(tier)])
    assert left.value.code == 0
    out, err = capsys.readouterr()
    assert out.startswith("shipped step-10: 2 files, ")
    told = "3 shipped, 0 there before, 0 missing; newest there: step 30: "
    assert out.splitlines()[-1] == told + str(tier)
    assert "not shipped: step-40: " in err


@pytest.mark.s3
def test_a_copy_that_was_killed_is_no_unknown_layout(s3_url: str) -> None:
    """What a killed copy has begun in an object store is an unfinished save to `latest`."""
    store = open_store(s3_url)
    store.put("step-50/.ftckpt/transfer.json", b'{"plan": "x"}')
    document = answer("latest", s3_url)
    assert document["result"]["code"] == 5, document["result"]
    assert "a transfer to" in document["result"]["message"]


@pytest.fixture
def thinned(tmp_path: Path, tier: Path) -> Path:
    """A root that was shipped to the tier, and whose two oldest are thinned since."""
    root, now = tmp_path / "old", time.time()
    for step in (100, 200, 300, 400):
        made_for_thinning(root, step, now)
    assert set(states(answer("sync", str(root), str(tier))).values()) == {"shipped"}
    thin(root, now=now)
    return root


WEIGHTS = "step-100.ftckpt-weights"


def test_weights_of_what_the_tier_holds_whole(thinned: Path, tier: Path) -> None:
    assert set(states(answer("sync", str(thinned), str(tier))).values()) == {"there"}
    assert not (tier / WEIGHTS).exists()


def test_a_cut_copy_of_what_was_thinned(thinned: Path, tier: Path) -> None:
    os.truncate(tier / "step-100/model.safetensors", 9)
    document = answer("sync", str(thinned), str(tier))
    assert states(document)[WEIGHTS] == "failed"
    assert document["result"]["code"] == 4


def test_another_run_under_the_old_name(thinned: Path, tier: Path) -> None:
    """Whatever has the name and a manifest may be of another run: the weights are shipped."""
    shutil.rmtree(tier / "step-100")
    other = made_for_thinning(tier, 100, time.time())
    (other / "model.safetensors").write_bytes(safetensors(w=bytes(1024)))
    assert ended("seal", str(other)) == 0
    assert states(answer("sync", str(thinned), str(tier)))[WEIGHTS] == "shipped"
    assert states(answer("sync", str(thinned), str(tier)))[WEIGHTS] == "there"


def test_what_the_tier_has_thinned_itself(thinned: Path, tier: Path) -> None:
    for path in sorted(tier.glob("step-*")):
        date(path, time.time() - (1000 - int(path.name[5:])) / 100 * DAY)
    thin(tier, now=time.time())
    assert set(states(answer("sync", str(thinned), str(tier))).values()) == {"there"}
    os.truncate(tier / WEIGHTS / "model.safetensors", 9)
    assert states(answer("sync", str(thinned), str(tier)))[WEIGHTS] == "failed"


def test_weights_of_another_run_at_the_tier(thinned: Path, tier: Path) -> None:
    shutil.rmtree(tier)
    for step in (100, 200, 300, 400):
        path = made_for_thinning(tier, step, time.time())
        (path / "model.safetensors").write_bytes(safetensors(w=bytes(1024)))
        date(path, time.time() - (1000 - step) / 100 * DAY)
    thin(tier, now=time.time())
    document = answer("sync", str(thinned), str(tier))
    assert states(document)[WEIGHTS] == "failed"
    assert document["result"]["code"] == 8
