"""The ledger of verdicts: taken over aloud, never for what changed, and worthless to forge."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ftckpt
from ftckpt.discovery import ledger as ledgers
from ftckpt.discovery.ledger import CheckedPlace, KeptVerdict, Ledger, Remembered, parse, standing
from ftckpt.errors import ExitCode
from ftckpt.storage import StoreOptions, open_store
from tests.builders.checkpoints import flip, save_dcp
from tests.workers.forked import run

REUSE = ("--level", "content", "--reuse", "1h")


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


def verdict_of(root: Path, name: str = "step-2", level: str = "content") -> Path:
    return root / ".ftckpt" / "verdicts" / name / f"{level}.u{os.geteuid()}.json"


def damage(root: Path, name: str = "step-2") -> None:
    """Flip a bit of a tensor: the headers stay whole, and only a check of the content sees it."""
    data = root / name / "__0_0.distcp"
    flip(data, data.stat().st_size // 2)


def test_a_check_that_passed_is_taken_over_aloud(root: Path) -> None:
    first = latest(root, *REUSE)
    assert (first["path"], first["remembered"]) == (f"{root}/step-2", [])
    again = latest(root, *REUSE)
    (taken,) = again["remembered"]
    assert (taken["url"], taken["evidence"]) == (f"{root}/step-2", "crc32")
    assert "was not read" in again["stderr"]
    assert str(verdict_of(root)) in again["stderr"]
    assert again["path"] == f"{root}/step-2"
    quiet = run(["latest", str(root), *REUSE, "-q"], os.environ)
    assert "was not read" in quiet.stderr  # never silently
    assert latest(root, "--level", "content").get("remembered") is None
    for document in (first, again):
        assert document["result"]["code"] == 0


def test_a_check_of_names_writes_nothing(root: Path) -> None:
    latest(root)
    assert not (root / ".ftckpt").exists()
    assert run(["verify", str(root / "step-2")], os.environ).returncode == 0
    assert not (root / ".ftckpt").exists()


def test_a_step_known_to_be_bad_is_never_printed(root: Path) -> None:
    damage(root)
    assert latest(root)["step"] == 2  # nobody knows
    assert latest(root, "--level", "content")["step"] == 1
    found = latest(root)
    assert (found["step"], [one["code"] for one in found["skipped"]]) == (1, [4])
    assert "no file has changed" in found["skipped"][0]["message"]
    shutil.rmtree(root / "step-2")
    save_dcp(root / "step-2", step=2)  # saved again
    assert latest(root)["step"] == 2


@pytest.mark.parametrize("words", [["verify", "--remember"], ["scrub"]])
def test_what_others_find_bad_is_not_printed(root: Path, words: list[str]) -> None:
    damage(root)
    place = str(root if words == ["scrub"] else root / "step-2")
    assert run([*words, place], os.environ).returncode == 4
    assert latest(root)["step"] == 1
    assert ftckpt.latest(str(root)).step == 1


def test_seal_remembers_what_it_checked(root: Path) -> None:
    assert run(["seal", str(root / "step-2")], os.environ).returncode == 0
    assert len(latest(root, *REUSE)["remembered"]) == 1


def test_what_changed_is_read_again(root: Path) -> None:
    latest(root, *REUSE)
    data = root / "step-2" / "__0_0.distcp"
    stat = data.stat()
    flip(data, stat.st_size // 2)
    os.utime(data, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # size, name and mtime are as before
    found = latest(root, *REUSE)
    assert (found["step"], [s["code"] for s in found["skipped"]]) == (1, [4])


@pytest.mark.parametrize("change", ["new file", "gone", "manifest"])
def test_a_change_beside_the_data_is_a_change(root: Path, change: str) -> None:
    latest(root, *REUSE)
    if change == "new file":
        (root / "step-2" / "stray").write_text("x")
    elif change == "gone":
        (root / "step-2" / "__0_0.distcp").unlink()
    else:
        (root / "step-2" / "ftckpt.manifest.json").write_text("{}")
    assert latest(root, *REUSE)["remembered"] == []


def test_a_cut_foreign_old_or_future_verdict_is_ignored(root: Path, tmp_path: Path) -> None:
    latest(root, *REUSE)
    path = verdict_of(root)
    good = path.read_bytes()
    said = parse(good)
    bad = {
        "cut": good[:-20],
        "empty": b"",
        "no object": b"[1]",
        "deep": b"[" * 20000,
        "another's": replace(said, name="step-1").dump(),
        "outside": replace(said, name="../step-2").dump(),
        "of other files": replace(said, identity="0" * 32).dump(),
        "future": replace(said, checked=time.time() + 1e6).dump(),
        "old": replace(said, checked=time.time() - 1e6).dump(),
        "huge": replace(said, reason="x" * (1 << 20)).dump(),
    }
    for name, data in bad.items():
        path.write_bytes(data)
        found = latest(root, *REUSE)
        assert (found["remembered"], found["step"]) == ([], 2), name
        assert len(latest(root, *REUSE)["remembered"]) == 1, name  # written anew
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    assert latest(copy, *REUSE)["remembered"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives files away")
def test_a_good_verdict_of_somebody_else_is_not_believed(root: Path) -> None:
    latest(root, *REUSE)
    os.chown(verdict_of(root), 12345, 12345)
    assert latest(root, *REUSE)["remembered"] == []
    os.chown(root, 54321, 54321)
    latest(root, *REUSE)
    os.chown(verdict_of(root), 54321, 54321)  # the root's owner
    assert len(latest(root, *REUSE)["remembered"]) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives files away")
def test_a_bad_verdict_of_somebody_else_hides_nothing(root: Path) -> None:
    def claim() -> None:
        latest(root, *REUSE)  # for the identity of the files
        own = verdict_of(root)
        said = json.loads(own.read_text()) | {"code": int(BAD), "reason": "said so"}
        own.unlink()
        theirs = own.with_name("content.u12345.json")
        theirs.write_text(json.dumps(said))
        os.chown(theirs, 12345, 12345)

    claim()
    found = latest(root)  # names and sizes alone were asked for: this one is read
    assert (found["step"], found["skipped"]) == (2, [])
    assert "said so" in found["stderr"]
    assert "said so" not in latest(root)["stderr"]  # the check of one's own is remembered
    damage(root)
    claim()
    found = latest(root)
    assert found["step"] == 1
    assert "CRC" in found["skipped"][0]["message"]


def one(code: ExitCode, level: str, at: float, *, own: bool = True, **more: Any) -> Remembered:
    verdict = KeptVerdict("step-2", level, int(code), "said", "crc32", 1, 1.0, at, "files", "me")
    return Remembered(replace(verdict, **more), "", own)


OK, BAD = ExitCode.OK, ExitCode.CORRUPT


def test_a_newer_check_of_ones_own_overrides_and_a_shallower_one_does_not() -> None:
    bad = one(BAD, "content", 10)
    assert standing([bad], "files", 100).bad is bad
    assert standing([bad], "others", 100).bad is None
    assert standing([bad, one(OK, "structure", 20)], "files", 100).bad is bad
    assert standing([bad, one(OK, "content", 5)], "files", 100).bad is bad
    assert standing([bad, one(OK, "content", 5)], "files", 100).good is None
    good = one(OK, "content", 20)
    assert standing([bad, good], "files", 100)[:2] == (None, good)
    assert standing([bad, one(OK, "values", 20)], "files", 100).bad is None


def test_what_somebody_else_says_is_believed_if_it_is_bad_and_overridden_by_oneself() -> None:
    theirs = one(BAD, "content", 10, own=False)
    assert standing([theirs], "files", 100).bad is theirs
    assert standing([theirs, one(OK, "content", 20, own=False)], "files", 100).bad is theirs
    assert standing([theirs, one(OK, "content", 20)], "files", 100).bad is None
    assert standing([one(OK, "content", 20, own=False)], "files", 100).good is None
    ahead = one(BAD, "content", 1e9, own=False)  # nobody is kept away for ever
    assert standing([ahead], "files", 100).bad is None


def test_warnings_that_were_errors_are_no_damage(root: Path) -> None:
    strict = one(BAD, "content", 10, strict=True)
    assert standing([strict], "files", 100).bad is None
    assert standing([strict], "files", 100).last is strict


def test_a_step_of_several_models_is_remembered_in_the_root(tmp_path: Path) -> None:
    for step in (1, 2):
        for model in ("actor", "critic"):
            save_dcp(tmp_path / f"global_step_{step}" / model, step=step)
    damage(tmp_path, "global_step_2/critic")
    found = ftckpt.latest(str(tmp_path), level="content")
    assert found.step == 1
    kept = {p.name for p in (tmp_path / ".ftckpt" / "verdicts").iterdir()}
    assert kept == {"global_step_1", "global_step_2"}
    assert ftckpt.latest(str(tmp_path)).step == 1
    rows = {Path(row.path).name: row for row in ftckpt.ls(str(tmp_path))}
    assert rows["global_step_2"].entry_class == "CORRUPT"
    verdict = rows["global_step_1"].verdict
    assert verdict is not None
    assert (verdict.read, rows["global_step_1"].sealed) == (True, False)


def test_a_step_of_several_models_by_its_own_path(tmp_path: Path) -> None:
    for step in (1, 2):
        for model in ("actor", "critic"):
            save_dcp(tmp_path / f"global_step_{step}" / model, step=step)
    damage(tmp_path, "global_step_2/critic")
    place = str(tmp_path / "global_step_2")
    assert int(ftckpt.verify(place, all_=True, remember=True).code) == 4
    assert ftckpt.latest(str(tmp_path)).step == 1
    assert not (tmp_path / "global_step_2" / ".ftckpt").exists()


def test_it_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "_MOST", 3)
    folder = root / ".ftckpt" / "verdicts"
    for number in range(5):
        gone = folder / f"gone-{number}"
        gone.mkdir(parents=True)
        (gone / "content.u0.json").write_text("{}")
    ftckpt.latest(str(root), level="content")
    assert [path.name for path in folder.iterdir()] == ["step-2"]


def test_a_link_in_our_place_is_not_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (root / ".ftckpt").symlink_to(tmp_path / "elsewhere")
    found = latest(root, *REUSE)
    assert (found["result"]["code"], found["remembered"]) == (0, [])
    assert "is not remembered" in found["stderr"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_root_is_fine(root: Path) -> None:
    root.chmod(0o500)
    found = latest(root, *REUSE)
    root.chmod(0o700)
    assert found["result"]["code"] == 0
    assert "is not remembered" in found["stderr"]


def test_a_ledger_elsewhere(root: Path, tmp_path: Path) -> None:
    folder = ("--ledger", str(tmp_path / "kept"))
    latest(root, *REUSE, *folder)
    assert not (root / ".ftckpt").exists()
    assert len(latest(root, *REUSE, *folder)["remembered"]) == 1
    assert latest(root, *REUSE)["remembered"] == []


def test_values_stand_for_content_and_not_the_other_way(root: Path) -> None:
    latest(root, *REUSE)
    values = ("--level", "values", "--reuse", "1h")
    assert latest(root, *values)["remembered"] == []
    assert latest(root, *REUSE)["remembered"][0]["level"] == "values"


def test_verify_remembers_for_latest(root: Path) -> None:
    newest = str(root / "step-2")
    assert run(["verify", newest, "--remember"], os.environ).returncode == 0
    assert len(latest(root, *REUSE)["remembered"]) == 1
    for words in (["--level", "structure"], ["--sample", "5%"]):
        assert run(["verify", newest, "--remember", *words], os.environ).returncode == 2
    assert run(["verify", newest, "--ledger", "x"], os.environ).returncode == 2
    flip(root / "step-1" / "__0_0.distcp", 3000)
    done = run(["verify", str(root / "step-1"), "--remember"], os.environ)
    assert done.returncode in (4, 7)
    assert parse(verdict_of(root, "step-1").read_bytes()).bad


def test_gc_and_status_take_the_folder_for_ours(root: Path) -> None:
    latest(root, *REUSE)
    for words in (["gc", str(root), "--keep-last", "2"], ["status", str(root)]):
        done = run(words, os.environ)
        assert done.returncode in (0, 14), done.stderr
        assert ".ftckpt" not in done.stdout


def test_wrong_flags(root: Path) -> None:
    assert latest(root, "--reuse", "1h")["result"]["code"] == 2


@pytest.mark.s3
def test_on_object_storage(root: Path, s3_url: str) -> None:
    store = open_store(s3_url)
    for file in sorted(root.rglob("*")):
        if file.is_file():
            store.put(file.relative_to(root).as_posix(), file.read_bytes())
    assert latest(s3_url, *REUSE)["remembered"] == []
    assert len(latest(s3_url, *REUSE)["remembered"]) == 1
    data = bytearray((root / "step-2" / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    store.put("step-2/__0_0.distcp", bytes(data))
    found = latest(s3_url, *REUSE)
    assert found["step"] == 1
    assert latest(s3_url)["step"] == 1


def test_a_verdict_on_a_delta_is_about_its_base_too(tmp_path: Path) -> None:
    for step in (1, 2):
        save_dcp(tmp_path / f"step-{step}", step=step)
    packed = ["delta", "pack", str(tmp_path / "step-1"), str(tmp_path / "step-2")]
    assert run([*packed, str(tmp_path / "delta-2")], os.environ).returncode == 0
    assert run(["verify", str(tmp_path / "delta-2"), "--remember"], os.environ).returncode == 0
    store = open_store(str(tmp_path))
    delta = ftckpt.open_checkpoint(str(tmp_path / "delta-2"))
    ledger, place = Ledger.around(delta.source.store, "", "", StoreOptions())
    part = CheckedPlace(delta.source.store, checkpoint=delta, known_as=place)
    assert ledger.standing(part).good is not None
    os.utime(tmp_path / "step-1" / "__0_0.distcp")
    assert ledger.standing(part).good is None
    assert store.traits.local
