"""`ftckpt latest` of several tiers, and of what a pointer means."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import DeniedError, UnavailableError
from ftckpt.storage import open_store
from ftckpt.storage.local.store import LocalStore
from tests.commands.latest.test_latest import flip, shorten, tear
from tests.commands.latest.test_latest import save as torch_save
from tests.commands.saves import DAY, answer, ended, save
from tests.workers.forked import run


@pytest.fixture(scope="session")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saves")
    for step in (10, 20, 30):
        torch_save(root / f"step-{step}", step)
    return root


@pytest.fixture
def make(saves: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return what makes a tier that holds some steps."""

    def tier(name: str, *steps: int) -> Path:
        (tmp_path / name).mkdir()
        for step in steps:
            shutil.copytree(saves / f"step-{step}", tmp_path / name / f"step-{step}")
        return tmp_path / name

    return tier


def latest(*words: object) -> tuple[int, Any, dict[str, Any]]:
    document = answer("latest", *map(str, words))
    return document["result"]["code"], document.get("path"), document


def test_the_newest_of_any_tier(make: Callable[..., Path]) -> None:
    near, far = make("near", 10, 20), make("far", 10, 20, 30)
    code, path, document = latest(near, far, "--level", "content")
    assert (code, path) == (0, f"{far}/step-30")
    assert [(t["tier"], t["away"], t["step"]) for t in document["tiers"]] == [
        (str(near), False, 20),
        (str(far), False, 30),
    ]
    shutil.copytree(far / "step-30", near / "step-30")
    assert latest(near, far)[:2] == (0, f"{near}/step-30")
    assert latest(far, near)[:2] == (0, f"{far}/step-30")
    assert latest(near, far, "--step-at-most", "20")[:2] == (0, f"{near}/step-20")


def test_a_damaged_copy_gives_way_to_a_whole_one(make: Callable[..., Path]) -> None:
    near, far = make("near", 10, 20, 30), make("far", 20, 30)
    flip(near / "step-30")
    code, path, document = latest(near, far, "--level", "content")
    assert (code, path) == (0, f"{far}/step-30")
    assert [s["name"] for s in document["skipped"]] == ["CORRUPT"]
    # Walking back goes through all tiers, step by step.
    shorten(far / "step-30")
    tear(near / "step-20")
    assert latest(near, far, "--level", "content")[:2] == (0, f"{far}/step-20")
    code, path, document = latest(near, far, "--level", "content", "--max-fallback", "0")
    assert (code, path) == (4, None)
    assert "none of the newest 1 step" in document["result"]["message"]
    flip(far / "step-20")
    flip(near / "step-10")
    code, path, document = latest(near, far, "--level", "content")
    assert (code, path) == (4, None)
    assert len(document["skipped"]) == 5


def test_a_copy_without_evidence_gives_way_to_a_sealed_one(make: Callable[..., Path]) -> None:
    near, far = make("near"), make("far")
    for tier in (near, far):
        save(tier, "checkpoint-100", DAY)
    assert latest(near, far, "--level", "content")[0] == 6
    assert ended("seal", str(far / "checkpoint-100")) == 0
    assert latest(near, far, "--level", "content")[:2] == (0, f"{far}/checkpoint-100")


def test_a_tier_that_is_away_may_hold_the_newest(make: Callable[..., Path], tmp_path: Path) -> None:
    near = make("near", 10, 20)
    code, path, document = latest(near, tmp_path / "mount")
    assert (code, path) == (15, None)
    assert f"is {near}/step-20 (step 20)" in document["result"]["message"]
    assert "--allow-missing-tier" in document["result"]["hint"]
    (tmp_path / "mount").mkdir()  # an empty directory may be a filesystem that is not mounted
    assert latest(near, tmp_path / "mount")[0] == 15
    code, path, document = latest(near, tmp_path / "mount", "--allow-missing-tier")
    assert (code, path) == (0, f"{near}/step-20")
    assert [t["away"] for t in document["tiers"]] == [False, True]
    done = run(["latest", str(near), str(tmp_path / "mount"), "--allow-missing-tier"], os.environ)
    assert done.stdout == f"{near}/step-20\n"
    assert "tier away (MISSING)" in done.stderr
    assert "may hold a newer step" in done.stderr
    # A marked root that holds nothing yet was read: it hides nothing.
    assert ended("latest", str(tmp_path / "mount"), "--create-root") == 0
    assert latest(near, tmp_path / "mount")[:2] == (0, f"{near}/step-20")
    # One that had a checkpoint and lost it is not a fresh one.
    (tmp_path / "mount" / "latest").write_text("step-30")
    assert latest(near, tmp_path / "mount")[0] == 4


@pytest.mark.parametrize(("error", "code"), [(UnavailableError, 10), (DeniedError, 11)])
def test_a_tier_that_fails(
    make: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    code: int,
) -> None:
    near, far = make("near", 20), make("far", 30)
    children = LocalStore.children

    def fail(store: LocalStore, path: str = "") -> Any:
        if store.url == str(far):
            raise error("it does not answer")
        return children(store, path)

    monkeypatch.setattr(LocalStore, "children", fail)
    assert latest(near, far)[:2] == (code, None)
    assert latest(far, near)[:2] == (code, None)
    assert latest(near, far, "--allow-missing-tier")[:2] == (0, f"{near}/step-20")


def test_a_copy_that_cannot_be_read(
    make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tier's copy of the same step is as good; an older step is not."""
    near, far = make("near", 20, 30), make("far", 20, 30)
    opened = LocalStore.open

    def fail(store: LocalStore, path: str) -> Any:
        if store.url == str(near) and path.startswith("step-30/"):
            raise UnavailableError("input/output error")
        return opened(store, path)

    monkeypatch.setattr(LocalStore, "open", fail)
    code, path, document = latest(near, far)
    assert (code, path) == (0, f"{far}/step-30"), document["result"]
    shutil.rmtree(far / "step-30")
    assert latest(near, far)[:2] == (10, None)


def test_tiers_without_a_checkpoint(make: Callable[..., Path]) -> None:
    near, far = make("near"), make("far")
    assert latest(near, far)[0] == 15
    for tier in (near, far):
        assert ended("latest", str(tier), "--create-root") == 0
    assert latest(near, far)[0] == 9  # each is known to hold none yet
    shutil.rmtree(far)
    assert latest(near, far)[0] == 15
    assert latest(near, far, "--allow-missing-tier")[0] == 15  # never a first start


def test_flags_that_are_about_one_root(make: Callable[..., Path]) -> None:
    near, far = make("near", 10), make("far", 10)
    for flags in (("--wait",), ("--pointer", "latest"), ("--create-root",)):
        assert latest(near, far, *flags)[0] == 2
    assert latest(near, "--allow-missing-tier")[0] == 2
    assert latest(near, "--pointer", "latest", "--wait")[0] == 2


@pytest.mark.s3
def test_tiers_on_two_kinds_of_store(make: Callable[..., Path], s3_url: str) -> None:
    near, local = make("near", 10, 20), make("far", 10, 20, 30)
    store = open_store(s3_url)
    for file in sorted(local.rglob("*")):
        if file.is_file():
            store.put(file.relative_to(local).as_posix(), file.read_bytes())
    assert latest(near, s3_url, "--level", "content")[:2] == (0, f"{s3_url}/step-30")
    assert latest(near, f"{s3_url}-mistyped")[0] == 15
    code, path, _ = latest(near, s3_url, "--endpoint", "http://127.0.0.1:9", "--retry-seconds", "1")
    assert (code, path) == (10, None)
    # The pointer in an object store.
    assert ended("promote", f"{s3_url}/step-20") == 0
    assert latest(s3_url, "--pointer", "last-known-good")[:2] == (0, f"{s3_url}/step-20")


def test_a_pointer_is_followed(make: Callable[..., Path]) -> None:
    root = make("near", 10, 20, 30)
    code, _, document = latest(root, "--pointer", "last-known-good")
    assert code == 15  # never a first start
    assert "ftckpt promote" in document["result"]["hint"]
    assert ended("promote", str(root / "step-20")) == 0
    words = (root, "--pointer", "last-known-good", "--level", "content")
    assert latest(*words)[:2] == (0, f"{root}/step-20")
    assert "last-known-good" in latest(root, "--pointer", "last-known-god")[2]["result"]["hint"]
    # Damage is not walked over unless that is asked for.
    flip(root / "step-20")
    assert latest(*words)[:2] == (4, None)
    assert latest(*words, "--max-fallback", "1")[:2] == (0, f"{root}/step-10")
    shutil.rmtree(root / "step-20")
    code, _, document = latest(*words)
    assert (code, document["result"]["name"]) == (4, "CORRUPT")
    assert "which is not there" in document["result"]["message"]


def test_a_tracker_is_followed_by_its_step(make: Callable[..., Path]) -> None:
    root = make("near", 10, 20, 30)
    (root / "step-20").rename(root / "iter_0000020")
    (root / "latest_checkpointed_iteration.txt").write_text("20")
    tracker = (root, "--pointer", "latest_checkpointed_iteration.txt")
    assert latest(*tracker)[:2] == (0, f"{root}/iter_0000020")
    (root / "best").symlink_to("step-10")
    assert latest(root, "--pointer", "best")[:2] == (0, f"{root}/step-10")
    assert latest(*tracker, "--step-at-most", "10")[0] == 8
