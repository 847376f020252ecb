"""`ftckpt gc --apply`, `gc undelete`, `gc purge`: what goes, what comes back, how it ends."""

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

from ftckpt.commands.cli import app
from ftckpt.commands.cli.invocation import Invocation
from ftckpt.discovery import resolve as opening
from ftckpt.errors import DeniedError
from ftckpt.formats.catalog import FORMATS
from ftckpt.retention.trash import trash_name
from ftckpt.retention.trash.local import LocalTrash
from ftckpt.retention.trash.open import open_trash
from ftckpt.storage import StoreOptions, open_store
from tests.commands.golden import check_golden, ftckpt
from tests.commands.saves import DAY, HOUR, answer, ended, save, tree
from tests.retention import thinning
from tests.test_docs import validate

KEEP = ("--keep-last", "2", "--keep-every", "1000")
STEPS = range(200, 2400, 200)
GOING = [200, 400, 600, 800, 1200, 1400, 1600, 1800]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    for step in STEPS:
        save(run, f"checkpoint-{step}", (24 - step // 100) * 10 * HOUR)
    return run


def steps(root: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("checkpoint-")) for p in root.glob("checkpoint-*"))


def saves(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return the tree without what ftckpt keeps of its own."""
    return {name: seen for name, seen in tree(root).items() if not name.startswith(".ftckpt")}


def events(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / ".ftckpt/log.jsonl").read_text().splitlines()]


def older_trash(root: Path, age: float) -> None:
    """Make what lies in the trash seem to have been dropped so long ago."""
    for path in (root / ".ftckpt/trash").iterdir():
        stamp, _, name = path.name.partition("~")
        then = time.strftime("%Y%m%dT%H%M%S", time.gmtime(time.time() - age))
        path.rename(path.with_name(f"{then}.{stamp.partition('.')[2]}~{name}"))


def test_what_the_plan_drops_goes_and_comes_back_as_it_was(root: Path) -> None:
    before = saves(root)
    ran = ftckpt("gc", "run", *KEEP, "--apply", cwd=root.parent)
    check_golden("gc-apply.txt", ran, timed=False)
    assert steps(root) == [1000, 2000, 2200]
    listed = ftckpt("gc", "undelete", "run", cwd=root.parent)
    assert [line.split()[1] for line in listed.stdout.splitlines()[2:]] == [
        f"checkpoint-{step}" for step in GOING
    ]
    assert ftckpt("gc", "undelete", "run", "--all", cwd=root.parent).returncode == 0
    assert saves(root) == before
    assert [e["event"] for e in events(root)] == ["applying", "applied", "undeleted"]
    assert events(root)[0]["drop"]["checkpoint-200"] == ["expired: no rule keeps it"]
    assert events(root)[0]["keep"]["checkpoint-1000"] == ["keep-every"]


def test_cron_with_nothing_to_do_says_one_line(root: Path) -> None:
    assert ended("gc", str(root), *KEEP, "--apply") == 0
    ran = ftckpt("gc", "run", *KEEP, "--apply", cwd=root.parent)
    assert (ran.returncode, ran.stdout, ran.stderr) == (
        0,
        "nothing to drop, 3 kept; 8 in the trash\n",
        "",
    )


def test_a_plan_is_carried_out_exactly(root: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(answer("gc", str(root), *KEEP)))
    # What has been saved since is none of its business, and one that has gone is no failure.
    save(root, "checkpoint-2400", HOUR)
    shutil.rmtree(root / "checkpoint-600")
    document = answer("gc", str(root), str(plan), "--apply")
    assert document["result"]["code"] == 0
    assert document["applied"]["dropped"] == [f"checkpoint-{s}" for s in GOING if s != 600]
    assert document["applied"]["absent"] == ["checkpoint-600"]
    assert steps(root) == [1000, 2000, 2200, 2400]
    again = answer("gc", str(root), str(plan), "--apply")
    assert (again["result"]["code"], again["applied"]["dropped"]) == (0, [])


@pytest.mark.parametrize("change", ["pinned", "touched", "pointed-to", "elsewhere"])
def test_a_plan_that_no_longer_fits_is_refused_whole(
    root: Path, tmp_path: Path, change: str
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(answer("gc", str(root), *KEEP)))
    target = root
    if change == "pinned":
        assert ended("pin", str(root), "400", "--reason", "wait") == 0
    elif change == "touched":
        os.utime(root / "checkpoint-400/model.safetensors")
    elif change == "pointed-to":
        (root / "latest").write_text("checkpoint-400")
    else:
        target = tmp_path / "other"
        save(target, "checkpoint-7", DAY)
    assert ended("gc", str(target), str(plan), "--apply") == 8
    assert steps(root) == list(STEPS)


def test_what_cannot_be_undone_is_said_twice(root: Path) -> None:
    gc = ("gc", str(root), *KEEP)
    for words in (
        ("--purge-now",),
        ("--purge-now", "--yes"),
        ("--yes",),
        ("--apply", "--yes"),
        ("--apply", "--purge-now"),
        ("--apply", "--trash-ttl", "1h"),
    ):
        assert ended(*gc, *words) == 2, words
    assert ended("gc", "purge", str(root), "--trash-ttl", "23h") == 2
    assert steps(root) == list(STEPS)
    document = answer("gc", str(root), *KEEP, "--apply", "--purge-now", "--yes")
    assert document["applied"]["freed"] == document["frees"] == 70 * len(GOING)
    assert (document["applied"]["trashed"], document["applied"]["waiting"]) == ([], 0)
    assert steps(root) == [1000, 2000, 2200]
    assert ended("gc", "undelete", str(root), "200") == 9


def test_the_trash_is_purged_when_its_time_is_up(root: Path) -> None:
    assert ended("gc", str(root), *KEEP, "--apply") == 0
    older_trash(root, 23 * HOUR)
    document = answer("gc", "purge", str(root))
    assert (document["result"]["code"], document["erased"]) == (0, [])
    older_trash(root, 2 * HOUR + DAY)
    assert ended("gc", "undelete", str(root), "200") == 0
    assert ended("pin", str(root), "200", "--reason", "found again") == 0
    document = answer("gc", str(root), *KEEP, "--apply")
    assert document["applied"]["purged"]["freed"] == 70 * (len(GOING) - 1)
    assert list((root / ".ftckpt/trash").iterdir()) == []
    assert steps(root) == [200, 1000, 2000, 2200]


def test_what_is_pinned_or_pointed_to_stays_in_the_trash(root: Path) -> None:
    assert ended("pin", str(root), "600", "--reason", "x") == 0
    assert ended("gc", str(root), *KEEP, "--apply") == 0
    (root / "latest").write_text("checkpoint-400")
    older_trash(root, 2 * DAY)
    document = answer("gc", "purge", str(root))
    assert [(h["rule"], Path(h["path"]).name.partition("~")[2]) for h in document["held"]] == [
        ("pointer", "checkpoint-400")
    ]
    assert len(document["erased"]) == len(GOING) - 2
    assert ended("gc", "undelete", str(root), "400") == 0
    assert steps(root) == [400, 600, 1000, 2000, 2200]


def test_having_back_replaces_nothing(root: Path) -> None:
    assert ended("gc", str(root), *KEEP, "--apply") == 0
    save(root, "checkpoint-400", HOUR)
    before = saves(root)
    document = answer("gc", "undelete", str(root), "400", "600")
    assert document["result"]["code"] == 14
    assert [r["name"] for r in document["restored"]] == ["checkpoint-600"]
    assert [(f["name"], f["code"]) for f in document["failed"]] == [("400", "REFUSED")]
    assert {name: saves(root)[name] for name in before} == before
    assert ended("gc", "undelete", str(root), "400") == 8
    assert ended("gc", "undelete", str(root), "999") == 9
    assert ended("gc", "undelete", str(root), "400", "--all") == 2
    assert ended("gc", "undelete", str(root / "absent")) == 9


def test_what_fails_is_told_and_the_rest_goes(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = LocalTrash.discard

    def discard(self: LocalTrash, found: Any, *args: Any, **more: Any) -> Any:
        if found.entry.step == 600:
            raise DeniedError("checkpoint-600 is not yours")
        return real(self, found, *args, **more)

    monkeypatch.setattr(LocalTrash, "discard", discard)
    words = ("gc", str(root), *KEEP, "--apply")
    result = app.run(words, Invocation(words=words))
    said = capsys.readouterr()
    assert result.code == 14
    assert said.out.splitlines()[-1] == (
        "dropped 7, 1 not: 490 B to be freed when the trash is purged"
    )
    assert "failed: checkpoint-600: checkpoint-600 is not yours" in said.err
    monkeypatch.undo()
    assert ended(*words) == 0
    assert steps(root) == [1000, 2000, 2200]


def test_two_at_once_do_not_meet(root: Path) -> None:
    place = opening.locate(str(root), StoreOptions())
    with open_trash(opening.open_root(place, FORMATS)).lock("somebody@else", time.time()):
        assert ended("gc", str(root), *KEEP, "--apply") == 8
        assert steps(root) == list(STEPS)
        # Looking needs nobody's leave.
        assert ended("gc", str(root), *KEEP) == 0
    assert ended("gc", str(root), *KEEP, "--apply") == 0
    with open_trash(opening.open_root(place, FORMATS)).lock("somebody@else", time.time()):
        assert ended("gc", "purge", str(root)) == ended("gc", "undelete", str(root), "200") == 8


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_the_middle_is_no_harm(root: Path, number: signal.Signals, code: int) -> None:
    script = (
        "import sys, time\n"
        "from ftckpt.commands.cli.app import main\n"
        "from ftckpt.retention.trash.local import LocalTrash\n"
        "real = LocalTrash.discard\n"
        "def discard(self, found, *args, **more):\n"
        "    if found.entry.step == 800:\n"
        "        print('ready', file=sys.stderr, flush=True)\n"
        "        for _ in range(6000):\n"
        "            time.sleep(0.1)\n"  # a signal just before one is seen when it ends
        "    return real(self, found, *args, **more)\n"
        "LocalTrash.discard = discard\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "gc", str(root), *KEEP, "--apply", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        process.send_signal(number)
        stdout, _ = process.communicate(timeout=60)
    document = json.loads(stdout)
    validate(document)
    assert (process.returncode, document["result"]["code"]) == (code, code)
    assert steps(root) == [800, 1000, 1200, 1400, 1600, 1800, 2000, 2200]
    assert ended("gc", str(root), *KEEP, "--apply") == 0
    assert steps(root) == [1000, 2000, 2200]
    assert len(list((root / ".ftckpt/trash").iterdir())) == len(GOING)


def test_a_root_may_be_called_like_a_verb(root: Path) -> None:
    root.rename(root.parent / "undelete")
    assert ftckpt("gc", "./undelete", *KEEP, cwd=root.parent).returncode == 0
    assert ftckpt("gc", *KEEP, "undelete", "--apply", cwd=root.parent).returncode == 0
    assert steps(root.parent / "undelete") == [1000, 2000, 2200]
    assert ftckpt("gc", "undelete", "undelete", "200", cwd=root.parent).returncode == 0


def test_several_runs_go_by_one_command(tmp_path: Path) -> None:
    for run in ("a", "b"):
        for step in range(100, 600, 100):
            save(tmp_path / run, f"checkpoint-{step}", (6 - step // 100) * DAY)
    document = answer("gc", str(tmp_path), "--keep-last", "2", "--apply")
    assert len(document["applied"]["dropped"]) == 6
    assert steps(tmp_path / "a") == steps(tmp_path / "b") == [400, 500]
    assert ended("gc", "undelete", str(tmp_path), "100") == 2
    assert ended("gc", "undelete", str(tmp_path), "b/checkpoint-100") == 0
    assert steps(tmp_path / "b") == [100, 400, 500]


@pytest.mark.s3
def test_the_same_on_a_bucket(root: Path, s3_url: str) -> None:
    store = open_store(s3_url)
    for step in STEPS:
        name = f"checkpoint-{step}/model.safetensors"
        store.put(name, (root / name).read_bytes())
    # The service tells times in whole seconds, rounded up: what lies in the future is kept.
    while any((entry.mtime or 0) > time.time() for entry in store.walk()):
        time.sleep(0.1)
    assert ended("pin", s3_url, "400", "--reason", "x") == 0
    document = answer("gc", s3_url, *KEEP, "--apply")
    assert document["result"]["code"] == 0
    assert document["applied"]["dropped"] == [f"checkpoint-{s}" for s in GOING if s != 400]
    assert ended("gc", "undelete", s3_url, "800") == 0
    assert ended("pin", s3_url, "400", "--remove") == 0
    names = {d["name"]: d["keep"] for d in answer("gc", s3_url, *KEEP)["plan"]["decisions"]}
    assert not names["checkpoint-800"]
    assert not names["checkpoint-400"]
    assert names["checkpoint-2000"]
    document = answer("gc", "purge", s3_url, "--trash-ttl", "0s", "--yes")
    assert document["freed"] == 70 * (len(GOING) - 2)
    left = {e.path for e in store.walk() if e.path.startswith("checkpoint-")}
    kept = [400, 800, 1000, 2000, 2200]
    assert left == {f"checkpoint-{step}/model.safetensors" for step in kept}


def test_a_name_forges_no_line(tmp_path: Path) -> None:
    run, name = tmp_path / "run", "checkpoint-1\ndropped 9\x1b[2J"
    save(run, "checkpoint-2", HOUR)
    save(run / ".ftckpt/trash", trash_name(name, time.time() - 2 * DAY), 3 * DAY)
    pinned = run / ".ftckpt/pins" / "checkpoint-1%0Adropped 9%1B%5B2J/me.json"
    pinned.parent.mkdir(parents=True)
    pinned.write_text("{}")
    held = ftckpt("gc", "purge", str(run))
    back = ftckpt("gc", "undelete", str(run), "--all")
    for said in (held.stdout, back.stdout):
        assert "checkpoint-1\\x0adropped 9\\x1b[2J" in said
        assert len(said.splitlines()) == 1
    assert (run / name).is_dir()


def test_old_milestones_keep_their_weights(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        thinning.save(tmp_path, step, time.time())
    plan = answer("gc", str(tmp_path), *thinning.KEEPS)
    assert (plan["thins"], plan["drops"]) == (2, 0)
    assert plan["wins"] > 0
    verdicts = {d["name"]: d["thin"] for d in plan["plan"]["decisions"]}
    assert [name for name, thin in verdicts.items() if thin] == ["step-200", "step-100"]
    file = tmp_path.parent / "plan.json"
    file.write_text(json.dumps(plan))
    done = answer("gc", str(tmp_path), str(file), "--apply")
    assert done["result"]["code"] == 0
    assert [one["name"] for one in done["thinned"]["thinned"]] == ["step-100", "step-200"]
    assert done["thinned"]["won"] > 0
    assert answer("gc", str(tmp_path), *thinning.KEEPS, "--apply")["thinned"]["thinned"] == []
    # No run goes on from them, and whoever wants weights says so.
    assert answer("latest", str(tmp_path))["step"] == 400
    refused = answer("latest", str(tmp_path), "--step-at-most", "200")
    assert refused["result"]["code"] == 6
    assert all("weights alone" in one["message"] for one in refused["skipped"])
    found = answer("latest", str(tmp_path), "--step-at-most", "200", "--weights")
    assert found["path"].endswith("step-200.ftckpt-weights")
    told = answer("status", str(tmp_path))
    (run,) = told["runs"]
    assert (run["thinned"], run["newest"]["step"]) == (2, 400)
    assert {s["step"]: s["thinned"] for s in run["saves"] if s["class"] == "COMMITTED"} == {
        100: True, 200: True, 300: False, 400: False,
    }  # fmt: skip
    assert answer("inspect", f"{tmp_path}@200")["step"] in (None, 200)
    assert answer("verify", str(tmp_path), "--all")["result"]["code"] == 0


def test_a_policy_file_thins(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    for step in (100, 200, 300, 400):
        thinning.save(root, step, time.time())
    file = tmp_path / "retention.toml"
    rules = 'name = "a"\nroots = ["*"]\nkeep-last = 1\nkeep-every = 100\n'
    for after, thins in (("1", 2), ('"36h"', 2), ('"300d"', 0)):
        file.write_text(f"[[tier]]\n{rules}thin-after = {after}\n")
        plan = answer("gc", str(root), "--policy", str(file))
        assert plan["thins"] == thins, after
    told = answer("status", str(root), "--policy", str(file))
    assert [save["thin"] for save in told["runs"][0]["saves"]] == [False] * 4
    assert ended("gc", str(root), "--keep-last", "1", "--thin-after", "soon") == 2
    assert ended("gc", str(root), "--keep-last", "1", "--thin-after", "0") == 2
