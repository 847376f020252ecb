"""Receipts of content checks: taken over aloud, and never for what changed."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import ftckpt
from ftckpt.storage import StoreOptions, open_store
from ftckpt.verification.receipts import Book, Receipt, parse
from tests.builders.checkpoints import flip, save_dcp
from tests.workers.forked import run

REUSE = ("--verify", "content", "--reuse", "1h")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        save_dcp(tmp_path / "run" / f"step-{step}", step=step)
    return tmp_path / "run"


def latest(root: Path | str, *flags: str) -> dict[str, Any]:
    done = run(["latest", str(root), "--json", *flags], os.environ)
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document | {"stderr": done.stderr}


def receipt_of(root: Path, name: str = "step-2") -> Path:
    return root / ".ftckpt" / "receipts" / f"{name}.json"


def test_a_check_that_passed_is_taken_over_aloud(root: Path) -> None:
    first = latest(root, *REUSE)
    assert (first["path"], first["receipts"]) == (f"{root}/step-2", [])
    again = latest(root, *REUSE)
    (taken,) = again["receipts"]
    assert (taken["url"], taken["evidence"]) == (f"{root}/step-2", "crc32")
    assert "was not read" in again["stderr"]
    assert str(receipt_of(root)) in again["stderr"]
    assert again["path"] == f"{root}/step-2"
    quiet = run(["latest", str(root), *REUSE, "-q"], os.environ)
    assert "was not read" in quiet.stderr  # never silently
    assert latest(root, "--verify", "content").get("receipts") is None
    for document in (first, again):
        assert document["result"]["code"] == 0


def test_nothing_is_written_unless_asked_for(root: Path) -> None:
    latest(root, "--verify", "content")
    assert not (root / ".ftckpt").exists()


def test_what_changed_is_read_again(root: Path) -> None:
    latest(root, *REUSE)
    data = root / "step-2" / "__0_0.distcp"
    stat = data.stat()
    flip(data, stat.st_size // 2)
    os.utime(data, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # size, name and mtime are as before
    found = latest(root, *REUSE)
    assert "files have changed since" in found["stderr"]
    assert (found["step"], [s["code"] for s in found["skipped"]]) == (1, [4])


@pytest.mark.parametrize("change", ["new file", "gone", "manifest"])
def test_a_change_beside_the_data_is_a_change(root: Path, change: str) -> None:
    latest(root, *REUSE)
    if change == "new file":
        (root / "step-2" / "stray").write_text("x")
    elif change == "gone":
        (root / "step-2" / "__0_0.distcp").unlink()
    else:
        assert run(["seal", str(root / "step-2")], os.environ).returncode == 0
    found = latest(root, *REUSE)
    assert found["receipts"] == []
    assert "have changed since" in found["stderr"]


def test_a_forged_cut_foreign_or_future_receipt_is_ignored(root: Path, tmp_path: Path) -> None:
    latest(root, *REUSE)
    path = receipt_of(root)
    good = path.read_bytes()
    receipt = parse(good)
    later = Receipt(**{f: getattr(receipt, f) for f in Receipt.__dataclass_fields__})
    object.__setattr__(later, "checked", time.time() + 1e6)
    old = parse(good)
    object.__setattr__(old, "checked", time.time() - 1e6)
    bad = {
        "forged": good.replace(b'"nbytes": ', b'"nbytes": 1'),
        "cut": good[:-20],
        "empty": b"",
        "no object": b"[1]",
        "deep": b"[" * 20000,
        "future": later.dump(),
        "old": old.dump(),
    }
    for name, data in bad.items():
        path.write_bytes(data)
        found = latest(root, *REUSE)
        assert "is ignored" in found["stderr"], name
        assert (found["receipts"], found["step"]) == ([], 2), name
        assert len(latest(root, *REUSE)["receipts"]) == 1, name  # written anew
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    assert "it is of " in latest(copy, *REUSE)["stderr"]


def test_a_link_in_our_place_is_not_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / ".ftckpt").symlink_to(tmp_path / "elsewhere")
    found = latest(root, *REUSE)
    assert (found["result"]["code"], found["receipts"]) == (0, [])
    assert "is not remembered" in found["stderr"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_root_is_fine(root: Path) -> None:
    root.chmod(0o500)
    found = latest(root, *REUSE)
    root.chmod(0o700)
    assert found["result"]["code"] == 0
    assert "is not remembered" in found["stderr"]


def test_a_receipt_elsewhere(root: Path, tmp_path: Path) -> None:
    folder = ("--receipts", str(tmp_path / "receipts"))
    latest(root, *REUSE, *folder)
    assert not (root / ".ftckpt").exists()
    assert len(latest(root, *REUSE, *folder)["receipts"]) == 1
    assert latest(root, *REUSE)["receipts"] == []


def test_values_stand_for_content_and_not_the_other_way(root: Path) -> None:
    latest(root, *REUSE)
    values = ("--verify", "values", "--reuse", "1h")
    assert "only its content was checked" in latest(root, *values)["stderr"]
    assert latest(root, *REUSE)["receipts"][0]["level"] == "values"


def test_verify_remembers_for_latest(root: Path) -> None:
    newest = str(root / "step-2")
    assert run(["verify", newest, "--remember"], os.environ).returncode == 0
    assert len(latest(root, *REUSE)["receipts"]) == 1
    for words in (["--level", "structure"], ["--sample", "5%"]):
        assert run(["verify", newest, "--remember", *words], os.environ).returncode == 2
    assert run(["verify", newest, "--receipts", "x"], os.environ).returncode == 2
    flip(root / "step-1" / "__0_0.distcp", 3000)
    done = run(["verify", str(root / "step-1"), "--remember"], os.environ)
    assert done.returncode in (4, 7)
    assert not receipt_of(root, "step-1").exists()


def test_gc_and_status_take_the_folder_for_ours(root: Path) -> None:
    latest(root, *REUSE)
    for words in (["gc", str(root), "--keep-last", "2"], ["status", str(root)]):
        done = run(words, os.environ)
        assert done.returncode in (0, 14), done.stderr
        assert ".ftckpt" not in done.stdout


def test_wrong_flags(root: Path) -> None:
    for flags in (["--reuse", "1h"], ["--verify", "content", "--receipts", "x"]):
        assert latest(root, *flags)["result"]["code"] == 2


@pytest.mark.s3
def test_on_object_storage(root: Path, s3_url: str) -> None:
    store = open_store(s3_url)
    for file in sorted(root.rglob("*")):
        if file.is_file():
            store.put(file.relative_to(root).as_posix(), file.read_bytes())
    assert latest(s3_url, *REUSE)["receipts"] == []
    assert len(latest(s3_url, *REUSE)["receipts"]) == 1
    data = bytearray((root / "step-2" / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    store.put("step-2/__0_0.distcp", bytes(data))
    found = latest(s3_url, *REUSE)
    assert "files have changed since" in found["stderr"]
    assert found["step"] == 1


def test_a_delta_has_no_receipt(tmp_path: Path) -> None:
    for step in (1, 2):
        save_dcp(tmp_path / f"step-{step}", step=step)
    packed = ["delta", "pack", str(tmp_path / "step-1"), str(tmp_path / "step-2")]
    assert run([*packed, str(tmp_path / "delta-2")], os.environ).returncode == 0
    delta = ftckpt.open_checkpoint(str(tmp_path / "delta-2"))
    book = Book(delta, StoreOptions())
    assert book.find("content", 1e9) == (None, "a delta has no receipt: its base may change alone")
