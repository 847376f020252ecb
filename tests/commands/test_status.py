"""`ftckpt status` on roots that torch itself wrote, for a person and for a monitor."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftckpt.storage import open_store
from tests.builders.checkpoints import save_dcp
from tests.commands.golden import check_golden, ftckpt

STEPS = (100, 200, 300, 400)
EVERY = 600


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved") / "run7"
    for step in STEPS:
        save_dcp(root / f"step-{step}", step=step)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A run that saved every ten minutes, within twenty seconds each, a minute ago the last."""
    copy = tmp_path / "run7"
    shutil.copytree(saved, copy)
    age(copy, time.time() - 60)
    return copy


def age(root: Path, last: float, every: float = EVERY) -> None:
    for number, step in enumerate(reversed(STEPS)):
        end = last - number * every
        files = sorted((root / f"step-{step}").iterdir())
        for place, file in enumerate(files):
            when = end - 20 + 20 * place / (len(files) - 1)
            os.utime(file, (when, when))


def without_sizes(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    """Return a run without what this machine's disk has left, and what torch's pickles take."""
    done.stdout = re.sub(r"^free.*\n", "", done.stdout, flags=re.MULTILINE)
    done.stdout = re.sub(r"[\d.]+ [KM]iB", "SIZE", done.stdout)
    return done


def test_times_of_a_copy_say_no_interval(root: Path) -> None:
    age(root, time.time() - 600, every=0.001)
    done = ftckpt("status", root)
    assert done.returncode == 0, done.stdout
    assert "one right after the other: such times are those of a copy" in done.stdout
    assert "growth" not in done.stdout
    done = ftckpt("status", root, "--expect-interval", "1m")
    assert done.returncode == 14
    assert "stale: " in done.stdout


def test_it_is_looked_at_again_until_somebody_ends_it(root: Path) -> None:
    words = [sys.executable, "-m", "ftckpt", "status", str(root), "--watch", "1s"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        seen = 0
        for line in run.stdout:
            seen += line.startswith("newest ")
            if seen == 2:
                break
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=60)
    assert run.returncode == 130
    assert seen == 2


@pytest.mark.parametrize(
    "words",
    [["--watch", "0.1s"], ["--watch", "9s", "--json"], ["--watch", "9s", "--plot", "x.png"],
     ["--watch", "9s", "--on-alert", "true"]],
)  # fmt: skip
def test_what_does_not_go_with_watching(root: Path, words: list[str]) -> None:
    assert ftckpt("status", root, *words).returncode == 2


def test_a_healthy_run(root: Path) -> None:
    age(root, time.time() - 2.5 * 3600, 2 * 3600)
    check_golden("status.txt", without_sizes(ftckpt("status", "run7", cwd=root.parent)))


def test_a_stale_run_with_everything_wrong(root: Path) -> None:
    age(root, time.time() - 2.5 * 3600)
    (root / "latest").write_text("step-500")
    for step in (500, 600):
        shutil.copytree(root / "step-100", root / f"step-{step}")
        (root / f"step-{step}" / ".metadata").unlink()
    done = ftckpt("status", "run7", "--tier", "elsewhere", cwd=root.parent)
    assert done.returncode == 9, "a tier that is not there is no answer"
    (root.parent / "elsewhere").mkdir()
    done = ftckpt("status", "run7", "--tier", "elsewhere", cwd=root.parent)
    check_golden("status-alerts.txt", without_sizes(done))


def test_an_interval_that_is_expected(root: Path) -> None:
    assert ftckpt("status", root, "--expect-interval", "10m").returncode == 0
    assert ftckpt("status", root, "--expect-interval", "20s").returncode == 14
    assert ftckpt("status", root, "--expect-interval", "20s", "--set", "late=9").returncode == 0
    assert ftckpt("status", root, "--expect-interval", "often").returncode == 2


def test_what_is_no_root(root: Path) -> None:
    assert ftckpt("status", root / "step-100").returncode == 2
    assert ftckpt("status", f"{root}@100").returncode == 2
    assert ftckpt("status", root / "absent").returncode == 9
    (root.parent / "empty").mkdir()
    assert ftckpt("status", root.parent / "empty").returncode == 9


def test_metrics_for_a_monitor(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "ftckpt.prom"
    assert ftckpt("status", root, "--prometheus", file, "-q").returncode == 0
    text = file.read_text()
    assert f'ftckpt_status_up{{root="{root}"}} 1\n' in text
    assert f'ftckpt_newest_step{{root="{root}",run="{root}"}} 400\n' in text
    assert sorted(os.listdir(tmp_path)) == ["ftckpt.prom", "run7"]
    shutil.rmtree(root)
    assert ftckpt("status", root, "--prometheus", file, "-q").returncode == 9
    text = file.read_text()
    assert f'ftckpt_status_up{{root="{root}"}} 0\n' in text
    assert "newest" not in text


def test_metrics_do_not_wait_for_a_reader_or_a_policy(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "ftckpt.prom"
    words = f"{sys.executable} -m ftckpt status {root} --prometheus {file}"
    done = subprocess.run(
        ["bash", "-c", f"{words} | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() in ("0", "141")
    assert "ftckpt_newest_step" in file.read_text()
    file.unlink()
    assert ftckpt("status", root, "--prometheus", file, "--policy", "none.toml").returncode == 2
    assert "ftckpt_newest_step" in file.read_text()


def test_metrics_that_cannot_be_written(root: Path) -> None:
    done = ftckpt("status", root, "--prometheus", root / "step-100" / ".metadata" / "x.prom")
    assert done.returncode == 2
    assert "is not a directory, and --prometheus" in done.stderr


def test_a_picture_with_a_policy(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    policy = tmp_path / "retention.toml"
    policy.write_text(f'[[tier]]\nname = "a"\nroots = ["{root}"]\nkeep-last = 1\n')
    picture = tmp_path / "saves.svg"
    done = ftckpt("status", root, "--policy", policy, "--plot", picture, "--json")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert [save["keep"] for save in run["saves"]] == [False, False, False, True]
    assert picture.read_text().startswith("<?xml")
    rows = (tmp_path / "saves.csv").read_text().splitlines()
    assert rows[0] == "name,step,class,began,finished,bytes,keep"
    assert len(rows) == 1 + len(STEPS)


def test_several_runs_are_told_one_by_one(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "runs" / "a")
    shutil.copytree(root, tmp_path / "runs" / "b")
    done = ftckpt("status", tmp_path / "runs", "--json")
    assert done.returncode == 0
    runs = json.loads(done.stdout)["runs"]
    assert [run["root"] for run in runs] == [f"{tmp_path}/runs/a", f"{tmp_path}/runs/b"]


@pytest.mark.s3
def test_a_root_on_an_object_store(root: Path, s3_url: str) -> None:
    store = open_store(s3_url)
    for file in sorted(root.rglob("*")):
        if file.is_file():
            store.put(file.relative_to(root).as_posix(), file.read_bytes())
    done = ftckpt("status", root, "--tier", s3_url, "--json")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert run["tier"]["missing"] == []
    there = ftckpt("status", s3_url, "--json", "--expect-interval", "1h")
    assert there.returncode == 0
    assert json.loads(there.stdout)["runs"][0]["free"] is None
