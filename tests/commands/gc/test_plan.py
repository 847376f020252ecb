"""`ftckpt gc` as it plans: what it shows, what it refuses, and that nothing changes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ftckpt.commands.cli import app
from ftckpt.commands.cli.invocation import Invocation
from tests.commands.golden import check_golden, ftckpt
from tests.commands.saves import DAY, HOUR, answer, ended, save, tree
from tests.test_docs import validate

KEEP = ("--keep-last", "2", "--keep-every", "1000")


@pytest.fixture
def root(here: Path) -> Path:
    """A run of ten days with everything that a run leaves behind."""
    shutil.rmtree(here / "run")
    run = here / "run"
    for step in range(200, 2400, 200):
        save(run, f"checkpoint-{step}", (24 - step // 100) * 10 * HOUR)
    save(run, "checkpoint-2400.tmp", 10 * HOUR)
    save(run, "checkpoint-1500.tmp", 3 * DAY)
    save(run, "checkpoint-2300", 36 * HOUR, damaged=True)
    save(run, "best", 2 * DAY)
    (run / "notes.txt").write_text("x")
    (run / "latest").write_text("checkpoint-2000")
    return run


def verdicts(document: dict[str, Any]) -> dict[str, list[str]]:
    """Return the rules that keep each entry; none for what goes."""
    return {
        d["name"]: [r["rule"] for r in d["reasons"]] if d["keep"] else []
        for d in document["plan"]["decisions"]
    }


def test_the_plan_says_for_each_what_becomes_of_it_and_why(root: Path) -> None:
    ftckpt("pin", "run", "600", "--reason", "figure 3", "--owner", "alice", cwd=root.parent)
    before = tree(root)
    check_golden("gc-plan.txt", ftckpt("gc", "run", *KEEP, cwd=root.parent), timed=False)
    assert tree(root) == before


def test_several_runs_are_decided_each_on_its_own(here: Path) -> None:
    for run in ("a", "b"):
        for step in range(100, 600, 100):
            save(here / "all" / run, f"checkpoint-{step}", (6 - step // 100) * DAY)
    done = ftckpt("gc", "all", "--keep-last", "2", cwd=here)
    check_golden("gc-runs.txt", done, timed=False)


def test_a_floor_is_told_with_the_flag_that_allows_it(root: Path) -> None:
    flags = ("--keep-last", "1", "--min-survivors", "4", "--max-delete", "2")
    check_golden("gc-refused.txt", ftckpt("gc", "run", *flags, cwd=root.parent), timed=False)
    document = answer("gc", str(root), *flags)
    assert (document["result"]["code"], len(document["plan"]["broken"])) == (8, 2)
    flags = (*flags[:2], *document["plan"]["broken"][0]["hint"].split()[:2], "--max-delete", "90%")
    assert answer("gc", str(root), *flags)["result"]["code"] == 0


def test_a_plan_is_read_back_as_it_was(root: Path) -> None:
    name = os.fsdecode(b"epoch=1-step=3-v\xff\\x41")
    save(root, name, 9 * DAY)
    done = ftckpt("gc", "run", *KEEP, "--json", cwd=root.parent)
    validate(json.loads(done.stdout))
    plan = root.parent / "plan.json"
    plan.write_text(done.stdout)
    shown = ftckpt("gc", "run", *KEEP, cwd=root.parent).stdout
    for words, standard_input in ((["plan.json"], ""), (["-"], done.stdout)):
        again = subprocess.run(
            [sys.executable, "-m", "ftckpt", "gc", "run", *words],
            input=standard_input,
            capture_output=True,
            text=True,
            cwd=root.parent,
            timeout=60,
            check=False,
        )
        assert again.returncode == 0, again.stderr
        assert again.stdout.splitlines()[:-1] == shown.splitlines()[:-1]
    # The plan alone is taken as well; one that somebody has edited is not.
    inner = json.loads(done.stdout)["plan"]
    plan.write_text(json.dumps(inner))
    assert ended("gc", str(root), str(plan)) == 0
    inner["order"].append("checkpoint-2200")
    plan.write_text(json.dumps(inner))
    assert ended("gc", str(root), str(plan)) == 2


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("ROOT", 2),
        ("ROOT --free 1TB", 2),
        ("ROOT --delete-corrupt", 2),
        ("ROOT --keep-last 0", 2),
        ("ROOT --keep-best 2", 2),
        ("ROOT --keep-best 2 --metric loss", 2),
        ("ROOT --keep-within 36", 2),
        ("ROOT --keep-within 36h", 0),
        ("ROOT --keep-last 3 --max-delete many", 2),
        ("ROOT --keep-last 3 --free 1", 2),
        ("ROOT --keep-last 3 --free 1TB", 14),
        ("ROOT --keep-last 3 --free 10B", 0),
        ("ROOT --keep-daily 3 --keep-tag x --keep-tag y", 0),
        ("ROOT --keep-last 3 --tier nvme", 2),
        ("ROOT --policy ROOT/absent.toml", 2),
        ("ROOT --keep-last 3 --purge-now", 2),
        ("ROOT --keep-last 3 --apply --purge-now", 2),
        ("ROOT --keep-last 3 --apply --yes", 2),
        ("ROOT ROOT/absent.json", 2),
        ("ROOT ROOT/notes.txt", 2),
        ("ROOT ROOT/notes.txt --keep-last 3", 2),
        ("ROOT@200 --keep-last 3", 2),
        ("ROOT/checkpoint-200 --keep-last 3", 2),
        ("ROOT/notes.txt --keep-last 3", 2),
        ("ROOT/absent --keep-last 3", 9),
        ("ROOT/checkpoint-2400.tmp/.. --keep-last 3 --keep-hourly 1", 0),
    ],
)
def test_what_each_ends_with(root: Path, words: str, code: int) -> None:
    before = tree(root)
    assert ended("gc", *words.replace("ROOT", str(root)).split()) == code
    assert tree(root) == before


def test_an_empty_directory_is_no_root(tmp_path: Path) -> None:
    assert ended("gc", str(tmp_path), "--keep-last", "3") == 9


def test_a_policy_file_holds_the_rules_alone(root: Path) -> None:
    file = root.parent / "retention.toml"
    file.write_text(
        f'[[tier]]\nname = "here"\nroots = ["{root.parent}/*"]\nkeep-last = 2\nkeep-every = 1000\n'
        '[[tier]]\nname = "other"\nroots = ["s3://*"]\nkeep-last = 5\n'
        '[[tier]]\nname = "idle"\nmax-delete = 3\n'
    )
    policy = ("--policy", str(file))
    by_flags = answer("gc", str(root), *KEEP)
    by_file = answer("gc", str(root), *policy)
    assert by_file["plan"]["policy"] == by_flags["plan"]["policy"]
    assert verdicts(by_file) == verdicts(by_flags)
    assert answer("gc", str(root), *policy, "--tier", "other")["plan"]["policy"]["keep_last"] == 5
    result = answer("gc", str(root), *policy, "--keep-last", "1")["result"]
    assert (result["code"], "contradict" in result["message"]) == (2, True)
    assert ended("gc", str(root), *policy, "--tier", "idle") == 2
    # However the root is typed: `status` and `gc` match its absolute path.
    relative = os.path.relpath(root)
    for typed in (relative, f"{relative}/../{root.name}/", f"file://{root}"):
        assert answer("gc", typed, *policy)["plan"]["policy"]["keep_last"] == 2
        (run,) = answer("status", typed, *policy)["runs"]
        kept = {s["name"]: s["keep"] for s in run["saves"]}
        drop = {d["name"] for d in by_file["plan"]["decisions"] if not d["keep"]}
        assert {name for name, keep in kept.items() if not keep} == drop
    # Limits are of one run, and may be given beside it.
    limited = answer("gc", str(root), *policy, "--max-delete", "1")
    assert (limited["result"]["code"], limited["plan"]["policy"]["max_delete"]) == (8, "1")
    # None lies in a root and is followed.
    shutil.copy(file, root / "retention.toml")
    assert ended("gc", str(root)) == 2


def test_a_wish_for_space_is_told_where_it_cannot_be_met(root: Path) -> None:
    document = answer("gc", str(root), *KEEP, "--free", "1TB")
    assert document["result"]["code"] == 14
    assert "of --free can be freed" in document["result"]["message"]
    assert document["drops"] == answer("gc", str(root), *KEEP)["drops"]
    few = answer("gc", str(root), *KEEP, "--free", "1B")
    assert (few["drops"], few["plan"]["order"]) == (1, ["checkpoint-200"])
    assert verdicts(few)["checkpoint-400"] == ["enough-freed"]


def test_a_large_root_is_shown_by_its_names(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ftckpt.commands.gc._MOST_FILES", 3)
    words = ("gc", str(root), *KEEP)
    assert app.run(words, Invocation(words=words)).code == 0
    said = capsys.readouterr()
    assert "drops 9, frees what was not counted" in said.out
    assert "files of what goes were not listed" in said.err
    assert answer(*words)["frees"] == 630


def test_damaged_ones_go_only_where_that_is_said(root: Path) -> None:
    assert verdicts(answer("gc", str(root), *KEEP))["checkpoint-2300"] == ["corrupt"]
    document = answer("gc", str(root), *KEEP, "--delete-corrupt")
    assert verdicts(document)["checkpoint-2300"] == []


def test_no_environment_deletes(root: Path) -> None:
    refused = ftckpt("gc", root, "--keep-last", "2", FTCKPT_GC_APPLY="1")
    assert refused.returncode == 2
    assert "sets no option" in refused.stderr


@pytest.mark.parametrize("columns", [50, 200])
def test_a_terminal_is_not_overrun(root: Path, columns: int) -> None:
    import pty

    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "ftckpt", "gc", "run", *KEEP],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=subprocess.DEVNULL,  # progress is drawn there, where this takes long
        env=os.environ | {"COLUMNS": str(columns), "TERM": "xterm"},
        cwd=root.parent,
    ) as process:
        os.close(slave)
        text = b""
        try:
            while data := os.read(master, 4096):
                text += data
        except OSError:  # how a terminal says that the other side has gone
            pass
        os.close(master)
    assert process.returncode == 0
    plain = re.sub(r"\x1b\[\d*m", "", text.decode())
    assert plain != text.decode()  # a terminal's classes are in colour
    assert "\x1b" not in plain  # and nothing else of a terminal's orders
    lines = plain.replace("\r", "").split("\n\n")[0].split("\n")
    assert max(map(len, lines)) <= columns
    assert any("checkpoint-200 " in line for line in lines)


def test_a_reader_that_has_gone_and_a_machine_without_torch(root: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    script = (
        "import sys\n"
        "from ftckpt.commands.cli.app import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print('torch' in sys.modules, file=sys.stderr)\n"
    )
    words = ["gc", str(root), *KEEP]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "False")
    closed = subprocess.run(
        [sys.executable, "-m", "ftckpt", *words], stdout=write_end, stderr=subprocess.PIPE
    )
    os.close(write_end)
    assert (closed.returncode, closed.stderr) == (141, b"")
