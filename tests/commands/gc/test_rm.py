"""`ftckpt rm`: what a person names goes to the trash, and nothing else; gc's floors hold."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import ftckpt
from ftckpt.errors import ExitCode, RefusedError
from ftckpt.retention.locks import leases
from tests.builders.checkpoints import flip, save_dcp
from tests.commands.golden import ftckpt as run
from tests.commands.saves import answer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (100, 200, 300, 400):
        save_dcp(tmp_path / "run" / f"step-{step}", step=step)
    return tmp_path / "run"


def damage(step: Path) -> None:
    file = step / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)


def steps(root: Path) -> list[str]:
    return sorted(one.name for one in root.iterdir() if one.name.startswith("step"))


def rm(root: Path, *words: str) -> tuple[int, str]:
    result = answer("rm", str(root), *words)["result"]
    return result["code"], result["message"]


def test_a_plan_first_and_a_trash_to_undo_it(root: Path) -> None:
    done = run("rm", root, "200")
    assert done.returncode == 0
    assert "step-200" in done.stdout
    assert "step-300" not in done.stdout  # what is not named is not shown
    assert f"carry it out: ftckpt rm {root} 200 --apply" in done.stdout
    assert len(steps(root)) == 4
    document = answer("rm", str(root), "200", "step-300", "--apply")
    assert (document["result"]["code"], document["drops"]) == (0, 2)
    assert sorted(document["applied"]["dropped"]) == ["step-200", "step-300"]
    assert steps(root) == ["step-100", "step-400"]
    assert answer("latest", str(root))["step"] == 400
    assert answer("gc", "undelete", str(root), "200")["result"]["code"] == 0
    assert steps(root) == ["step-100", "step-200", "step-400"]


def test_the_newest_and_a_damaged_one_go_if_they_are_named(root: Path) -> None:
    damage(root / "step-200")
    assert answer("verify", f"{root}@200", "--remember")["result"]["code"] == 4
    assert rm(root, "latest", "200", "--apply")[0] == 0
    assert steps(root) == ["step-100", "step-300"]


def test_too_few_good_ones_are_not_left(root: Path) -> None:
    code, said = rm(root, "100", "200", "300", "--apply")
    assert (code, "1 good checkpoint would be left" in said) == (8, True)
    assert rm(root, "100", "200", "300", "--min-survivors", "1", "--apply")[0] == 0
    code, said = rm(root, "400", "--min-survivors", "1", "--apply")
    assert (code, "no finished checkpoint would be left" in said) == (8, True)
    assert steps(root) == ["step-400"]


def test_survivors_that_are_damaged_are_none(root: Path) -> None:
    for step in (300, 400):
        damage(root / f"step-{step}")
    code, _ = rm(root, "100", "200", "--apply")
    assert (code, len(steps(root))) == (8, 4)
    # What was found is remembered.
    assert rm(root, "100", "200", "--no-check", "--apply")[0] == 8


def test_what_somebody_needs_stays(root: Path) -> None:
    assert answer("pin", str(root), "100", "--owner", "ann")["result"]["code"] == 0
    (root / "latest").write_text("step-300")
    document = answer("rm", str(root), "100", "200", "--apply")
    result = document["result"]
    assert (result["code"], result["message"]) == (8, "step-100 stays: pinned: by ann")
    assert result["hint"] == f"ftckpt pin {root} step-100 --remove takes your pin away"
    assert rm(root, "300", "--apply") == (8, "step-300 stays: pointer: latest names it")
    assert len(steps(root)) == 4  # of several none goes


def test_the_base_of_a_delta_stays_without_it(root: Path, tmp_path: Path) -> None:
    made = ftckpt.delta_pack(str(root / "step-100"), str(root / "step-200"), str(root / "step-250"))
    assert made is not None
    code, said = rm(root, "100", "--apply")
    assert (code, said) == (8, "step-100 stays: base: step-250 depends on it")
    assert rm(root, "100", "step-250", "200", "--apply")[0] == 0
    assert steps(root) == ["step-300", "step-400"]


def test_what_is_read_stays(root: Path) -> None:
    from ftckpt.operations.opening import STORES, runs_at

    (place,) = runs_at(str(root), STORES)
    leases.take(place, "step-100", holder="reader", now=time.time())
    code, said = rm(root, "100", "--apply")
    assert (code, "lease" in said) == (8, True)


def test_what_ends_how(root: Path, tmp_path: Path) -> None:
    assert rm(root, "7")[0] == 9
    assert rm(root, "step-7", "--apply")[0] == 9
    assert rm(tmp_path / "absent", "7")[0] == 9
    assert rm(root)[0] == 2
    (root / "notes").mkdir()
    assert rm(root, "notes", "--apply") == (8, "notes stays: foreign: no format knows it")


def test_it_does_not_count_as_a_run_of_the_rules(root: Path) -> None:
    """`--max-delete` leaves out what was saved since the rules ran last."""
    from ftckpt.operations.opening import STORES, runs_at
    from ftckpt.retention.records import log

    assert rm(root, "100", "--apply")[0] == 0
    (place,) = runs_at(str(root), STORES)
    assert log.last_applied(place) is None
    events = [json.loads(line) for line in (root / ".ftckpt/log.jsonl").read_text().splitlines()]
    assert [e.get("named") for e in events if e["event"] == "applied"] == [["step-100"]]


def test_python_does_the_same(root: Path) -> None:
    planned = ftckpt.rm(str(root), 200)
    assert [d.entry.name for d in planned.plan.drop] == ["step-200"]
    assert planned.applied is None
    with pytest.raises(RefusedError, match="would be left"):
        ftckpt.rm(str(root), [100, 200, 300], apply=True)
    done = ftckpt.rm(str(root), [100, "step-200"], apply=True)
    assert done.code is ExitCode.OK
    assert steps(root) == ["step-300", "step-400"]


@pytest.mark.s3
def test_on_a_bucket(root: Path, s3_url: str) -> None:
    from ftckpt.storage import open_store

    store = open_store(s3_url)
    for file in sorted(root.rglob("*")):
        if file.is_file():
            store.put(file.relative_to(root).as_posix(), file.read_bytes())
    while any((entry.mtime or 0) > time.time() for entry in store.walk()):
        time.sleep(0.1)
    assert answer("rm", s3_url, "200", "--apply")["result"]["code"] == 0
    assert [row["step"] for row in answer("ls", s3_url)["checkpoints"]] == [400, 300, 100]
    assert answer("gc", "undelete", s3_url, "200")["result"]["code"] == 0
    assert len(answer("ls", s3_url)["checkpoints"]) == 4
