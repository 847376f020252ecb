"""`ftckpt promote`: pointers as their frameworks read them, moved to what was verified."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.discovery import promotion
from ftckpt.errors import DeniedError
from ftckpt.retention.records import log
from ftckpt.storage import open_store
from ftckpt.storage.s3.store import S3Store
from tests.commands.latest.test_latest import flip
from tests.commands.latest.test_latest import save as torch_save
from tests.commands.saves import DAY, answer, ended, save

GOOD = "last-known-good"


@pytest.fixture(scope="session")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saves")
    for step in (10, 20, 30):
        torch_save(root / f"step-{step}", step)
    return root


@pytest.fixture
def root(saves: Path, tmp_path: Path) -> Path:
    shutil.copytree(saves, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, root: Path) -> str:
    """The same root on each kind of store."""
    if request.param == "local":
        return str(root)
    url = str(request.getfixturevalue("s3_url"))
    store = open_store(url)
    for file in sorted(root.rglob("*")):
        if file.is_file():
            store.put(file.relative_to(root).as_posix(), file.read_bytes())
    # The service stamps whole seconds, rounded up: what is dated in the future counts in no rule.
    while max(entry.mtime or 0.0 for entry in store.walk("")) > time.time():
        time.sleep(0.05)
    return url


def said(place: str, name: str) -> str | None:
    store = open_store(place)
    if name not in store.names():
        return None
    return store.read(name).decode()


def test_a_root_without_pointers(place: str) -> None:
    document = answer("promote", f"{place}/step-20")
    assert document["result"]["code"] == 0, document["result"]
    assert document["pointers"] == [
        {"name": GOOD, "before": None, "after": "step-20", "moved": True}
    ]
    assert (document["evidence"], document["step"]) == (["crc32"], 20)
    assert said(place, GOOD) == "step-20"
    assert said(place, "latest") is None
    document = answer("promote", f"{place}@latest")
    assert (document["target"], said(place, GOOD)) == (f"{place}/step-30", "step-30")
    document = answer("promote", f"{place}@30")
    assert [one["moved"] for one in document["pointers"]] == [False]
    # Backwards is said twice.
    document = answer("promote", f"{place}/step-10")
    assert document["result"]["code"] == 8
    assert "says step 30, and step-10 is step 10" in document["result"]["message"]
    assert said(place, GOOD) == "step-30"
    assert ended("promote", f"{place}/step-10", "--backwards") == 0
    assert said(place, GOOD) == "step-10"
    # What it said before is in the log.
    from ftckpt.discovery.resolve import locate, open_root
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.storage import StoreOptions

    read = open_root(locate(place, StoreOptions()), FORMATS)
    (*_, told) = log.read(read)
    assert (told["pointer"], told["from"], told["to"]) == (GOOD, "step-30", "step-10")


def test_a_pointer_is_followed_by_gc(place: str) -> None:
    assert ended("promote", f"{place}/step-10") == 0
    plan = answer("gc", place, "--keep-last", "1", "--min-survivors", "1")["plan"]
    kept = {d["name"]: [r["rule"] for r in d["reasons"]] for d in plan["decisions"] if d["keep"]}
    assert "pointer" in kept["step-10"], kept
    assert "step-20" not in kept


def test_what_is_not_good_is_refused(root: Path) -> None:
    (root / "latest").write_text("step-10")
    flip(root / "step-30")
    (root / "step-20" / ".metadata").unlink()
    save(root, "checkpoint-40", DAY)
    for name, code in (("step-30", 4), ("step-20", 5), ("checkpoint-40", 6)):
        document = answer("promote", str(root / name), "--pointer", "latest")
        assert document["result"]["code"] == code, document["result"]
        assert (root / "latest").read_text() == "step-10"
    assert "ftckpt seal" in document["result"]["hint"]
    words = ("promote", str(root / "checkpoint-40"), "--pointer", "latest")
    assert ended(*words, "--level", "structure") == 0
    assert (root / "latest").read_text() == "checkpoint-40"


def renamed(root: Path, spell: Callable[[int], str]) -> Path:
    for step in (10, 20, 30):
        (root / f"step-{step}").rename(root / spell(step))
    return root


_SKYRL = "latest_ckpt_global_step.txt"


def test_megatron_and_verl_read_a_number(root: Path) -> None:
    tracker = root / "latest_checkpointed_iteration.txt"
    renamed(root, "iter_{:07d}".format)
    tracker.write_text("10")
    assert ended("promote", str(root / "iter_0000030")) == 0
    assert tracker.read_bytes() == b"30"  # int(f.read().strip()), and the path by {:07d}
    (root / "iter_0000030").rename(root / "iter_30")
    assert ended("promote", str(root / "iter_30"), "--pointer", tracker.name) == 2
    (root / "iter_30").rename(root / "global_step_30")
    assert ended("promote", str(root / "global_step_30"), "--pointer", tracker.name) == 0
    assert ended("promote", str(root / "global_step_30"), "--pointer", _SKYRL) == 0
    assert (root / _SKYRL).read_bytes() == b"30"
    (root / _SKYRL).unlink()
    (root / "global_step_30").rename(root / "release")
    assert ended("promote", str(root / "release"), "--backwards") == 0
    assert tracker.read_bytes() == b"release"


def test_a_tracker_that_would_lead_elsewhere(root: Path) -> None:
    for name in ("latest_checkpointed_iteration.txt", "dlrover_latest.txt"):
        document = answer("promote", str(root / "step-30"), "--pointer", name)
        assert document["result"]["code"] == (2 if "iteration" in name else 0)
    assert (root / "dlrover_latest.txt").read_text() == "30"
    # The name says another step than the content: its readers would take what is not meant.
    (root / "step-20").rename(root / "iter_0000099")
    words = ("promote", str(root / "iter_0000099"), "--backwards", "--pointer")
    assert ended(*words, "latest_checkpointed_iteration.txt") == 2
    assert not (root / "latest_checkpointed_iteration.txt").exists()


def test_a_link_stays_a_link(root: Path) -> None:
    (root / "latest").symlink_to("step-10")
    (root / "best").symlink_to("./step-10")
    document = answer("promote", str(root / "step-30"))
    assert [one["name"] for one in document["pointers"]] == ["latest"]
    assert os.readlink(root / "latest") == "step-30"
    assert os.readlink(root / "best") == "./step-10"
    assert ended("promote", str(root / "step-20"), "--pointer", "best") == 0
    assert os.readlink(root / "best") == "./step-20"
    # Through a link its target is promoted.
    assert answer("promote", str(root / "best"))["target"].endswith("/step-20")


def test_names_that_are_no_pointer(root: Path) -> None:
    document = answer("promote", str(root / "step-30"), "--pointer", "last-known-god")
    assert document["result"]["code"] == 2
    assert document["result"]["hint"] == "did you mean last-known-good?"
    (root / "latest").mkdir()
    assert ended("promote", str(root / "step-30"), "--pointer", "latest") == 8
    (root / "latest").rmdir()
    (root / "latest").symlink_to("/etc/passwd")
    assert ended("promote", str(root / "step-30"), "--pointer", "latest") == 8
    assert os.readlink(root / "latest") == "/etc/passwd"
    (root / "latest").unlink()
    (root / "latest").write_text("nonsense")
    assert ended("promote", str(root / "step-30")) == 8
    assert ended("promote", str(root / "step-30"), "--backwards") == 0


def test_places_that_are_no_checkpoint(root: Path) -> None:
    assert ended("promote", str(root)) == 2
    assert ended("promote", str(root / "step-99")) == 9
    assert ended("promote", f"{root}@99") == 9


def test_deepspeed_keeps_two_pointers(tmp_path: Path, root: Path) -> None:
    """A pointer to checkpoints of another format is not moved."""
    save(root, "step-30-universal", DAY)
    (root / "latest").write_text("step-10")
    (root / "latest_universal").write_text("step-30-universal")
    document = answer("promote", str(root / "step-30"))
    assert document["result"]["code"] == 0
    assert (root / "latest").read_bytes() == b"step-30"
    assert (root / "latest_universal").read_text() == "step-30-universal"


def test_a_second_promotion_is_refused(root: Path) -> None:
    from ftckpt.discovery.resolve import locate, open_root
    from ftckpt.formats.catalog import FORMATS
    from ftckpt.storage import StoreOptions

    read = open_root(locate(str(root), StoreOptions()), FORMATS)
    with promotion.held(read, "alice@login1"):
        document = answer("promote", str(root / "step-30"))
    assert document["result"]["code"] == 8
    assert "another promotion is at work" in document["result"]["message"]
    assert not (root / GOOD).exists()
    assert ended("promote", str(root / "step-30")) == 0


def test_killed_before_the_last_act(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "latest").write_text("step-10")

    def die(path: str, data: bytes, *, mark: str) -> None:
        (root / f".ftckpt-tmp-{mark}0123").write_bytes(data)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(promotion, "write_over", die)
        assert ended("promote", str(root / "step-30")) == 130
    other = root / ".ftckpt-tmp-of-another-verb"
    other.write_bytes(b"")
    assert (root / "latest").read_text() == "step-10"
    assert ended("promote", str(root / "step-30")) == 0
    assert (root / "latest").read_text() == "step-30"
    assert [*root.glob(".ftckpt-tmp-*")] == [other]
    lines = (root / ".ftckpt" / "log.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [(e["from"], e["to"]) for e in events] == [("step-10", "step-30")] * 2


def test_a_root_that_may_not_be_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise DeniedError("read-only")

    (root / "latest").write_text("step-10")
    monkeypatch.setattr(log, "append", refuse)
    assert ended("promote", str(root / "step-30")) == 11
    assert (root / "latest").read_text() == "step-10"


def test_a_dry_run_writes_nothing(root: Path) -> None:
    (root / "latest").write_text("step-10")
    before = sorted(root.rglob("*"))
    document = answer("promote", str(root / "step-30"), "--dry-run")
    assert document["pointers"] == [
        {"name": "latest", "before": "step-10", "after": "step-30", "moved": False}
    ]
    assert sorted(root.rglob("*")) == before
    assert (root / "latest").read_text() == "step-10"


def test_a_trainer_moves_the_pointer_meanwhile(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(place)
    store.put("latest", b"step-10")
    append = log.append

    def meanwhile(*args: Any) -> None:
        append(*args)
        store.put("latest", b"step-30")

    monkeypatch.setattr(log, "append", meanwhile)
    document = answer("promote", f"{place}/step-20")
    assert document["result"]["code"] == 8, document["result"]
    assert "was changed meanwhile" in document["result"]["message"]
    assert said(place, "latest") == "step-30"


@pytest.mark.s3
def test_one_conditional_put(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost answer is settled by reading back, and nothing else is ever taken for ours."""
    store = open_store(s3_url)
    assert isinstance(store, S3Store)
    store.put("latest", b"one")
    entry = store.stat("latest")
    once = store.client.once

    async def lose(operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        await once(operation, parameters)
        raise ConnectionResetError

    with monkeypatch.context() as patched:
        patched.setattr(store.client, "once", lose)
        store.replace(entry, b"two")
    assert store.read("latest") == b"two"
    from ftckpt.errors import IncompleteError

    with pytest.raises(IncompleteError, match="was replaced"):
        store.replace(entry, b"three")
    assert store.read("latest") == b"two"


def test_checkpoints_that_are_files(tmp_path: Path) -> None:
    import torch

    root = tmp_path / "run"
    root.mkdir()
    for step in (1, 2):
        state = {"model": {"w": torch.ones(4)}, "step": step}
        torch.save(state, root / f"step-{step}.pt")
    assert ended("promote", str(root / "step-2.pt")) == 0
    assert (root / GOOD).read_text() == "step-2.pt"
