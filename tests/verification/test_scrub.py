"""A scrub: each checkpoint of a root in its turn, over many runs, and no bad one forgotten."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import ftckpt
from ftckpt.errors import DeniedError, ExitCode, UsageError
from ftckpt.verification import scrub as scrubbing
from ftckpt.verification.places import PlaceReport
from tests.builders.checkpoints import flip, save_dcp
from tests.json_run import ftckpt_json


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save_dcp(tmp_path / "run" / f"step-{step}", step=step)
    return tmp_path / "run"


def scrub(root: Path, budget: str = "1ms", **options: Any) -> PlaceReport:
    return ftckpt.scrub(str(root), budget=budget, **options)


def read(report: PlaceReport) -> list[str]:
    """Return the names of the checkpoints that a run has read."""
    return [Path(one.url).name for one in report.checkpoints if one.bytes_read]


def test_each_has_its_turn(root: Path) -> None:
    turns = [read(scrub(root)) for _ in range(4)]
    assert turns == [["step-3"], ["step-2"], ["step-1"], ["step-3"]]
    save_dcp(root / "step-4", step=4)
    assert read(scrub(root)) == ["step-4"]
    assert read(scrub(root)) == ["step-2"]


def test_the_summary_says_how_far_it_has_come(root: Path) -> None:
    first = scrub(root).scrub
    assert first is not None
    assert (first.checkpoints, first.checked, first.never, first.oldest) == (3, 1, 2, None)
    whole = scrub(root, budget="").scrub
    assert whole is not None
    assert (whole.checked, whole.never) == (3, 0)
    assert whole.oldest is not None
    assert whole.ledger == f"{root}/.ftckpt/verdicts"


def test_a_bad_one_is_told_by_every_run_until_it_changes(root: Path) -> None:
    flip(root / "step-3" / "__0_0.distcp", 4000)
    bad = scrub(root).code
    assert bad in (ExitCode.CORRUPT, ExitCode.UNSAFE)
    for name in ("step-2", "step-1"):
        report = scrub(root)
        assert read(report) == [name]
        assert report.code is bad
        (known,) = [one for one in report.checkpoints if not one.bytes_read]
        assert known.url == f"{root}/step-3"
        assert "unchanged since" in known.message
    shutil.rmtree(root / "step-3")
    save_dcp(root / "step-3", step=3)
    report = scrub(root)
    assert read(report) == ["step-3"]
    assert report.code is ExitCode.OK


def test_what_was_saved_again_counts_as_never_read(root: Path) -> None:
    scrub(root, budget="")
    shutil.rmtree(root / "step-1")
    save_dcp(root / "step-1", step=1)
    assert read(scrub(root)) == ["step-1"]


def test_a_budget_that_is_enough_reads_all(root: Path) -> None:
    assert read(scrub(root, budget="1h")) == ["step-3", "step-2", "step-1"]


def test_an_unfinished_save_is_passed_over_aloud(root: Path) -> None:
    (root / "step-3" / ".metadata").unlink()
    answer = ftckpt_json("scrub", str(root))
    assert answer["result"]["code"] == 0
    assert answer["scrub"]["checkpoints"] == 2
    assert [Path(one["target"]).name for one in answer["checkpoints"]] == ["step-2", "step-1"]


def test_the_ledger_elsewhere(root: Path, tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "kept")
    assert read(scrub(root, ledger=elsewhere)) == ["step-3"]
    assert not (root / ".ftckpt").exists()
    assert read(scrub(root, ledger=elsewhere)) == ["step-2"]
    assert read(scrub(root)) == ["step-3"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "x"}'])
def test_a_verdict_that_cannot_be_read_says_nothing(root: Path, text: str) -> None:
    scrub(root)
    (file,) = (root / ".ftckpt" / "verdicts" / "step-3").iterdir()
    file.write_text(text)
    assert read(scrub(root)) == ["step-3"]


def test_what_somebody_else_has_read_counts(root: Path) -> None:
    ftckpt.latest(str(root), level="content")
    assert read(scrub(root)) == ["step-2"]


def test_what_was_removed_meanwhile_is_passed_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = scrubbing.Scrub.turns

    def turns(one: scrubbing.Scrub, root_: Any) -> Any:
        for child in real(one, root_):
            if child.candidate.path == "step-3":
                (root / "step-3").rename(root.parent / "trash")
            yield child

    monkeypatch.setattr(scrubbing.Scrub, "turns", turns)
    report = scrub(root, budget="1h")
    assert (report.code, read(report)) == (ExitCode.OK, ["step-2", "step-1"])


def test_what_cannot_be_remembered_is_not_begun(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftckpt.storage.local.store import LocalStore

    def refuse(*_: Any, **__: Any) -> None:
        raise DeniedError("read-only")

    monkeypatch.setattr(LocalStore, "put", refuse)
    with pytest.raises(DeniedError) as caught:
        scrub(root)
    assert "--ledger DIR" in caught.value.hint


def test_a_link_in_our_place_is_not_written_through(root: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (root / ".ftckpt").symlink_to(tmp_path / "victim")
    assert ftckpt_json("scrub", str(root))["result"]["code"] == 7
    assert list((tmp_path / "victim").iterdir()) == []


def test_its_flags(root: Path) -> None:
    with pytest.raises(UsageError, match="needs --remember"):
        ftckpt.verify(str(root), ledger="x")
    with pytest.raises(UsageError, match="more than nothing"):
        scrub(root, budget="0s")
    with pytest.raises(UsageError, match="is one checkpoint"):
        scrub(root / "step-1")


def test_a_pointer_that_dangles_is_still_damage(root: Path) -> None:
    (root / "latest").write_text("step-9")
    assert scrub(root).code is ExitCode.CORRUPT


def alerts(root: Path, **options: Any) -> dict[str, str]:
    found = ftckpt.status(str(root), **options)
    kinds = ("unread", "corrupt")  # saves of the same moment are late at once
    return {str(a.kind): a.message for a in found.alerts if a.kind in kinds}


def test_status_says_what_waits_for_longest(root: Path) -> None:
    assert alerts(root) == {}
    assert alerts(root, scrub_every="30d") == {"unread": "no scrub has read any of the saves"}
    for step in (1, 2, 3):
        for file in (root / f"step-{step}").iterdir():
            os.utime(file, (time.time() - step * 86400,) * 2)
    scrub(root)
    (run,) = ftckpt.status(str(root)).runs
    assert run.scrubbed is not None
    assert (run.scrubbed.saves, run.scrubbed.read) == (3, 1)
    assert run.scrubbed.longest == f"{root}/step-2"
    assert run.scrubbed.unread_s == pytest.approx(2 * 86400, abs=600)
    assert alerts(root, scrub_every="3d") == {}
    assert "step-2 was not read for 2 d" in alerts(root, scrub_every="1d")["unread"]
    scrub(root, budget="")
    assert alerts(root, scrub_every="1d") == {}


def test_status_tells_of_what_a_scrub_found_bad(root: Path, tmp_path: Path) -> None:
    flip(root / "step-3" / "__0_0.distcp", 4000)
    elsewhere = tmp_path / "kept"
    scrub(root, ledger=str(elsewhere))
    said = alerts(root, ledger=str(elsewhere))["corrupt"]
    assert "step-3 is known to be bad" in said
    metrics = tmp_path / "metrics.prom"
    document = ftckpt_json(
        "status", str(root), "--ledger", str(elsewhere), "--prometheus", str(metrics)
    )
    assert document["result"]["code"] == ExitCode.PARTIAL
    (bad,) = document["runs"][0]["scrub"]["bad"]
    assert bad["path"] == f"{root}/step-3"
    assert "ftckpt_scrub_bad{" in metrics.read_text()
    # What was saved again is no longer the damaged one.
    shutil.rmtree(root / "step-3")
    save_dcp(root / "step-3", step=3)
    assert "corrupt" not in alerts(root, ledger=str(elsewhere))
