"""`ftckpt pin` and `tag`: who keeps what, from the command line."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.commands.golden import ftckpt
from tests.commands.saves import answer

ME = pwd.getpwuid(os.getuid()).pw_name


def marks(root: str) -> list[dict[str, Any]]:
    """Return what `ls` shows of pins and tags, also of what is gone."""
    rows: list[dict[str, Any]] = answer("ls", root, "--all")["checkpoints"]
    return [row for row in rows if row["pins"] or row["tags"]]


def events(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / ".ftckpt/log.jsonl").read_text().splitlines()]


def test_a_pin_holds_a_checkpoint_until_it_is_taken_away(here: Path) -> None:
    root = here / "run"
    gc = ("--keep-last", "1", "--min-survivors", "1")
    assert answer("gc", str(root), *gc)["drops"] == 1
    made = answer("pin", str(root), "1", "--reason", "paper", "--owner", "alice")["pins"]
    assert [(p["entry"], p["owner"], p["path"]) for p in made] == [
        ("step-1", "alice", f"{root}/step-1")
    ]
    document = answer("gc", str(root), *gc)
    assert document["drops"] == 0
    (row,) = [d for d in document["plan"]["decisions"] if d["name"] == "step-1"]
    assert row["reasons"] == [{"rule": "pinned", "detail": "by alice: paper"}]
    assert (
        answer("pin", str(root), "1", "--remove", "--owner", "alice")["pins"][0]["reason"]
        == "paper"
    )
    assert answer("gc", str(root), *gc)["drops"] == 1
    said = [(e["event"], e["entry"], e["owner"], e["by"]) for e in events(root)]
    assert said == [("pinned", "step-1", "alice", ME), ("unpinned", "step-1", "alice", ME)]


def test_a_command_in_a_hint_can_be_pasted(here: Path) -> None:
    (here / "run").rename(here / "run 7")
    done = ftckpt("pin", "run 7", "5", "--reason", "paper", cwd=here)
    assert done.returncode == 9
    assert "hint: the nearest by number: 2\n" in done.stderr
    done = ftckpt("pin", "run 7", "best", "--reason", "paper", cwd=here)
    assert done.returncode == 9
    assert "hint: ftckpt ls 'run 7' lists them" in done.stderr


def test_pins_and_tags_are_listed_with_what_they_are_about(here: Path) -> None:
    root = here / "run"
    assert marks(str(root)) == []
    ftckpt("pin", "run", "1", "--reason", "figure 3", "--owner", "alice", cwd=here)
    ftckpt("pin", "run", "step-1", "--reason", "restart", "--owner", "bob", cwd=here)
    ftckpt("tag", "run", "latest", "milestone", "released", cwd=here)
    (root / "step-1").rename(here / "elsewhere")
    done = ftckpt("ls", "run", "--all", cwd=here)
    for line in done.stdout.splitlines():
        assert line == line.rstrip()
    there, gone = marks(str(root))
    assert (there["path"], there["tags"]) == (f"{root}/step-2", ["milestone", "released"])
    assert (gone["path"], gone["class"]) == (f"{root}/step-1", "ABSENT")
    assert [(p["owner"], p["reason"]) for p in gone["pins"]] == [
        ("alice", "figure 3"),
        ("bob", "restart"),
    ]
    assert all(time.time() - 600 < p["time"] <= time.time() for p in gone["pins"])
    assert "ABSENT" in done.stdout
    assert "pin of alice: figure 3, pin of bob: restart" in done.stdout
    assert "tag milestone, tag released" in done.stdout
    assert [row["path"] for row in answer("ls", str(root))["checkpoints"]] == [f"{root}/step-2"]
    # What marks a checkpoint that is gone can still be taken away, by its step.
    assert answer("pin", str(root), "1", "--remove", "--all")["result"]["code"] == 0
    assert [row["path"] for row in marks(str(root))] == [f"{root}/step-2"]


def test_a_pin_needs_no_reason(here: Path) -> None:
    root = here / "run"
    made = answer("pin", str(root), "1")
    assert (made["removed"], made["pins"][0]["reason"]) == (False, "")
    document = answer("gc", str(root), "--keep-last", "1", "--min-survivors", "1")
    (row,) = [d for d in document["plan"]["decisions"] if d["name"] == "step-1"]
    assert row["reasons"] == [{"rule": "pinned", "detail": f"by {ME}"}]
    gone = answer("pin", str(root), "1", "--remove")
    assert (gone["removed"], gone["pins"][0]["owner"]) == (True, ME)
    assert answer("pin", str(root), "1", "--remove")["result"]["code"] == 9


def test_nobody_takes_away_the_pin_of_another_by_accident(here: Path) -> None:
    root = here / "run"
    answer("pin", str(root), "1", "--reason", "paper", "--owner", "alice")
    result = answer("pin", str(root), "1", "--remove")["result"]
    assert (result["code"], result["hint"]) == (9, "pinned by alice: --owner says whose")
    answer("pin", str(root), "1", "--reason", "mine")
    assert [p["owner"] for p in answer("pin", str(root), "1", "--remove")["pins"]] == [ME]
    assert [p["owner"] for p in marks(str(root))[0]["pins"]] == ["alice"]


def test_a_tag_keeps_where_a_rule_asks_for_it(here: Path) -> None:
    root = here / "run"
    gc = ("--keep-last", "1", "--min-survivors", "1")
    assert answer("tag", str(root), "1", "milestone")["tags"] == [
        {"entry": "step-1", "path": f"{root}/step-1", "tags": ["milestone"]}
    ]
    assert answer("gc", str(root), *gc)["drops"] == 1
    assert answer("gc", str(root), *gc, "--keep-tag", "milestone")["drops"] == 0
    assert answer("tag", str(root), "1", "other", "--remove")["result"]["code"] == 9
    assert answer("tag", str(root), "1", "milestone", "--remove")["result"]["code"] == 0
    assert answer("gc", str(root), *gc, "--keep-tag", "milestone")["drops"] == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("pin ROOT 1", 0),
        ("pin ROOT 1 --reason=", 0),
        ("pin ROOT 1 --all", 2),
        ("pin ROOT 1 --remove --reason x", 2),
        ("pin ROOT 9 --reason x", 9),
        ("pin ROOT step-9 --reason x", 9),
        ("pin ROOT latest --reason x", 0),
        ("pin ROOT ROOT/step-1 --reason x", 0),
        ("pin ROOT@1 1 --reason x", 2),
        ("pin ROOT/absent 1 --reason x", 9),
        ("pin ROOT/step-1 1 --reason x", 2),
        ("pin ROOT 1 --remove", 9),
        ("pin ROOT 9 --remove", 9),
        ("pin ROOT 1 --remove --owner x --all", 2),
        ("tag ROOT 1", 2),
        ("tag ROOT 1 a b", 0),
        ("tag ROOT 1 a --remove", 9),
    ],
)
def test_what_each_ends_with(here: Path, words: str, code: int) -> None:
    document = answer(*words.replace("ROOT", str(here / "run")).split())
    assert document["result"]["code"] == code, document["result"]


def test_a_step_of_several_runs_must_be_named(here: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(here / "run/step-1", here / "both" / name / "step-1")
    result = answer("pin", str(here / "both"), "1", "--reason", "x")["result"]
    assert (result["code"], result["hint"]) == (2, "name one of: a/step-1, b/step-1")
    made = answer("pin", str(here / "both"), "b/step-1", "--reason", "x")["pins"]
    assert [p["path"] for p in made] == [f"{here}/both/b/step-1"]
    assert (here / "both/b/.ftckpt/pins/step-1" / f"{ME}.json").exists()


@pytest.mark.s3
def test_pins_on_a_bucket(here: Path, s3_url: str) -> None:
    from ftckpt.storage import open_store

    store = open_store(s3_url)
    for file in sorted((here / "run").rglob("*")):
        if file.is_file():
            store.put(file.relative_to(here / "run").as_posix(), file.read_bytes())
    assert answer("pin", s3_url, "1", "--reason", "x")["result"]["code"] == 0
    assert [row["path"] for row in marks(s3_url)] == [f"{s3_url}/step-1"]
