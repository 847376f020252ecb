"""The pieces in docs/jobs do what they say: their own lines are run, on real checkpoints."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from ftckpt.commands.cli import verbs
from ftckpt.errors import ExitCode
from tests.builders.checkpoints import flip, save_dcp

JOBS = Path(__file__).parent.parent / "docs" / "jobs"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "run 7"
    for step in (10, 20, 30, 40, 50):
        save_dcp(path / f"step-{step}", step=step)
    return path


@pytest.fixture
def short_root(root: Path) -> Path:
    """Three of the steps: each is some twenty requests where it is shipped to a service."""
    for step in (10, 20):
        shutil.rmtree(root / f"step-{step}")
    return root


@pytest.fixture
def path(tmp_path: Path, command_folder: Path) -> str:
    """A PATH with ftckpt, and with a scheduler and a launcher that say how they were called."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name in ("srun", "scontrol"):
        (bin_ / name).write_text(f'#!/bin/sh\nprintf "%s|" {name} "$@"\nexit ${{TRAINING:-0}}\n')
    for each in bin_.iterdir():
        each.chmod(0o755)
    return f"{bin_}:{command_folder}:{os.environ['PATH']}"


def run(command: Sequence[str], path: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PATH": path, "SLURM_JOB_ID": "77", "SLURM_NNODES": "2"} | environment,
        timeout=120,
        check=False,
    )


# It runs what it is given, on one node; guard waits for nothing and starts nothing again.
SRUN = '#!/bin/sh\ng="$1 $2"; shift 2; exec $g --max-restarts 0 --timeout 0 "$@"\n'


def train(path: str, root: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the guarded job: srun runs what it is given, on one node, and torchrun says its words."""
    folder = Path(path.partition(":")[0])
    (folder / "srun").write_text(SRUN)
    (folder / "torchrun").write_text('#!/bin/sh\nprintf "%s|" torchrun "$@"\nexit ${TRAINING:-0}\n')
    (folder / "torchrun").chmod(0o755)
    (folder / "scontrol").write_text('#!/bin/sh\nprintf "%s|" scontrol "$@"\n')
    environment |= {"SLURM_JOB_NODELIST": "n[1-2]"}
    return run(["bash", str(JOBS / "train.sbatch")], path, ROOT=str(root), **environment)


TRAINED = (
    "torchrun|--nnodes=2|--nproc-per-node=gpu|--rdzv-backend=c10d|"
    "--rdzv-endpoint=scontrol|show|hostnames|n[1-2]|:29500|train.py|"
)


def test_a_job_restarts_from_the_newest_that_passes(root: Path, path: str) -> None:
    file = root / "step-50" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    done = train(path, root)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{TRAINED}--resume|{root}/step-40|"
    assert "step-50" in done.stderr


def test_a_job_without_a_checkpoint_starts_afresh(tmp_path: Path, path: str) -> None:
    marked = run(["ftckpt", "latest", str(tmp_path / "new"), "--create-root"], path)
    assert marked.returncode == 0, marked.stderr
    done = train(path, tmp_path / "new")
    assert done.stdout == TRAINED


def test_a_job_never_starts_afresh_in_a_place_that_may_not_be_the_root(
    tmp_path: Path, path: str
) -> None:
    (tmp_path / "unmounted").mkdir()
    for place in ("unmounted", "mistyped"):
        done = train(path, tmp_path / place)
        assert (done.returncode, done.stdout) == (15, "")


def test_a_job_never_starts_afresh_where_checkpoints_were(root: Path, path: str) -> None:
    assert run(["ftckpt", "latest", str(root), "--create-root"], path).returncode == 0
    marker = root / ".ftckpt" / "root.json"
    marker.parent.mkdir(exist_ok=True)
    marker.touch()
    (root / "latest").write_text("step-50")
    for step in root.glob("step-*"):
        shutil.rmtree(step)
    done = train(path, root)
    assert (done.returncode, done.stdout) == (4, "")
    assert "step-50" in done.stderr


def test_a_job_ends_as_its_training_ends(root: Path, path: str) -> None:
    assert train(path, root, TRAINING="17").returncode == 17


def test_a_job_never_starts_afresh_upon_damage(root: Path, path: str) -> None:
    for step in root.iterdir():
        flip(step / "__0_0.distcp", (step / "__0_0.distcp").stat().st_size // 2)
    done = train(path, root)
    assert (done.returncode, done.stdout) == (4, "")


def test_a_job_is_requeued_while_storage_does_not_answer(path: str) -> None:
    done = train(
        path,
        "s3://bucket/run7",
        AWS_ENDPOINT_URL="http://127.0.0.1:9",
        AWS_ACCESS_KEY_ID="a",
        AWS_SECRET_ACCESS_KEY="b",
        FTCKPT_RETRY_SECONDS="0.1",
    )
    assert (done.returncode, done.stdout) == (0, "scontrol|requeue|77|")


def test_a_job_that_was_preempted_is_requeued(root: Path, path: str) -> None:
    done = train(path, root, TRAINING="75")
    assert (done.returncode, done.stdout.endswith("|scontrol|requeue|77|")) == (0, True)


def test_the_job_of_kubernetes_retries_what_a_new_pod_can_help(
    root: Path, path: str, tmp_path: Path
) -> None:
    text = (JOBS / "train-job.yaml").read_text()
    ignored, failed = (
        {int(code) for code in found.split(",")}
        for found in re.findall(r"values: \[([\d, ]+)\]", text)
    )
    assert ignored == {ExitCode.UNAVAILABLE, ExitCode.REQUEUE}
    guards = set(verbs.load("guard").codes) | {ExitCode.USAGE}
    assert failed == guards - ignored - {ExitCode.OK}
    (line,) = re.findall(r"^ +command: (\[.*\])$", text, re.MULTILINE)
    command = [str(root) if w == "/ckpt/run7" else w for w in re.findall(r'"([^"]*)"', line)]
    train(path, root)  # makes torchrun say its words
    done = run(command, path)
    assert done.stdout == f"torchrun|--nproc-per-node=8|train.py|--resume|{root}/step-50|"


@pytest.mark.parametrize("place", ["local", pytest.param("s3", marks=pytest.mark.s3)])
def test_a_job_restarts_from_the_newest_of_two_tiers(
    place: str, short_root: Path, path: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tier = request.getfixturevalue("s3_url") if place == "s3" else str(tmp_path / "tier")
    if place == "local":
        (tmp_path / "tier").mkdir()

    def restart() -> subprocess.CompletedProcess[str]:
        line = ["bash", str(JOBS / "tiers.sbatch")]
        return run(line, path, ROOT=str(tmp_path / "nvme"), TIER=tier)

    # Nothing shows yet that the durable tier is there: no fresh start.
    assert restart().returncode == 1
    assert run(["ftckpt", "latest", tier, "--create-root"], path).returncode == 0
    done = restart()
    assert done.returncode == 0
    assert "--resume" not in done.stdout
    assert run(["ftckpt", "sync", str(short_root), tier], path).returncode == 0
    assert f"--resume|{tier}/step-50|" in restart().stdout
    # The node's own disk has the same step, and later a newer one that is damaged.
    shutil.copytree(short_root / "step-50", tmp_path / "nvme" / "step-50")
    assert f"--resume|{tmp_path}/nvme/step-50|" in restart().stdout
    save_dcp(tmp_path / "nvme" / "step-60", step=60)
    for step in (50, 60):
        file = tmp_path / "nvme" / f"step-{step}" / "__0_0.distcp"
        flip(file, file.stat().st_size // 2)
    done = restart()
    assert f"--resume|{tier}/step-50|" in done.stdout
    assert done.stderr.count("skipped (CORRUPT)") == 2
    # Away: nothing older is taken instead.
    line = ["bash", str(JOBS / "tiers.sbatch")]
    away = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "FTCKPT_RETRY_SECONDS": "1"}
    away |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    done = run(line, path, ROOT=str(tmp_path / "nvme"), TIER="s3://bucket/run7", **away)
    assert (done.returncode, done.stdout) == (0, "scontrol|requeue|77|")


def cron_lines() -> list[str]:
    text = (JOBS / "crontab").read_text()
    return [line for line in text.splitlines() if re.match(r"[*\d]", line)]


def test_the_lines_of_the_crontab(root: Path, path: str, tmp_path: Path) -> None:
    metrics = tmp_path / "ftckpt.prom"
    lines = cron_lines()
    assert len(lines) == 4
    (tmp_path / "tier").mkdir()
    for line in lines:
        times, command = line.split(None, 5)[:5], line.split(None, 5)[5]
        assert all(re.fullmatch(r"[\d*/]+", each) for each in times)
        assert "%" not in command, "cron takes it for an end of line"
        command = command.replace("/var/lib/node_exporter/ftckpt.prom", str(metrics))
        done = run(["sh", "-c", command], path, ROOT=str(root), TIER=str(tmp_path / "tier"))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), line
    kept = sorted(one.name for one in root.iterdir() if one.name.startswith("step"))
    assert kept == ["step-30", "step-40", "step-50"]
    assert "ftckpt_status_up" in metrics.read_text()


@pytest.mark.parametrize("place", ["local", pytest.param("s3", marks=pytest.mark.s3)])
def test_the_line_that_ships_to_a_second_tier(
    place: str, short_root: Path, path: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (line,) = [line for line in cron_lines() if "ftckpt sync" in line]
    command = ["sh", "-c", line.split(None, 5)[5]]
    tier = request.getfixturevalue("s3_url") if place == "s3" else str(tmp_path / "tier")
    if place == "local":
        # A mount that is missing is told, and nothing is written to the disk below it.
        done = run(command, path, ROOT=str(short_root), TIER=tier)
        assert done.returncode == 9, done.stderr
        (tmp_path / "tier").mkdir()
    file = short_root / "step-50" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    (short_root / "step-40" / ".metadata").unlink()
    done = run(command, path, ROOT=str(short_root), TIER=tier)
    assert done.returncode == 4, done.stderr
    assert done.stdout == ""
    (said,) = [line for line in done.stderr.splitlines() if "not shipped" in line]
    assert "step-50" in said
    done = run(["ftckpt", "latest", tier, "--level", "content"], path)
    assert (done.returncode, done.stdout) == (0, f"{tier}/step-30\n")


def test_the_line_that_keeps_the_last_known_good(root: Path, path: str) -> None:
    (line,) = [line for line in cron_lines() if "ftckpt promote" in line]
    command = ["sh", "-c", line.split(None, 5)[5]]
    done = run(command, path, ROOT=str(root))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (root / "last-known-good").read_text() == "step-50"
    shutil.copytree(root / "step-50", root / "step-60")
    save_dcp(root / "step-70", step=70)
    file = root / "step-70" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    done = run(command, path, ROOT=str(root))
    assert done.returncode == 4
    assert "step-70 does not pass" in done.stderr
    assert (root / "last-known-good").read_text() == "step-50"


def test_cron_mails_what_a_person_should_look_at(root: Path, path: str) -> None:
    command = cron_lines()[0].split(None, 5)[5].replace("--apply", "--max-delete 1 --apply")
    done = run(["sh", "-c", command], path, ROOT=str(root))
    assert (done.returncode, done.stdout) == (8, "")
    assert "2 of 5 entries would be dropped at once" in done.stderr


def test_the_line_for_cron_on_the_page_is_silent(root: Path, path: str) -> None:
    page = (JOBS.parent / "retention.md").read_text().split("**A line for cron**")[1]
    line = page.split("```sh\n")[1].split("\n```")[0].replace("/ckpt/run7", '"$ROOT"')
    for _ in range(2):  # there is something to drop, and there is nothing
        done = run(["sh", "-c", line], path, ROOT=str(root))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len([p for p in root.iterdir() if p.name.startswith("step")]) == 3


def test_the_units_of_systemd(root: Path, path: str) -> None:
    text = (JOBS / "ftckpt-gc.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    command = [str(root) if word == "${ROOT}" else word for word in shlex.split(line)]
    command[0] = Path(command[0]).name
    done = run(command, path)
    assert done.returncode == 0, done.stderr
    if shutil.which("systemd-analyze"):
        checked = run(["systemd-analyze", "verify", str(JOBS / "ftckpt-gc.timer")], path)
        assert "Unknown" not in checked.stderr


def test_the_cron_job_of_kubernetes(root: Path, path: str, tmp_path: Path) -> None:
    text = (JOBS / "gc-cronjob.yaml").read_text()
    (line,) = re.findall(r"^ +command: (\[.*\])$", text, re.MULTILINE)
    policy = tmp_path / "retention.toml"
    policy.write_text('[[tier]]\nname = "all"\nroots = ["*"]\nkeep-last = 2\n')
    places = {"s3://bucket/run7": str(root), "/etc/ftckpt/retention.toml": str(policy)}
    command = [places.get(word, word) for word in re.findall(r'"([^"]*)"', line)]
    assert set(places.values()) <= set(command)
    done = run(command, path)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in root.iterdir() if p.name[0] == "s") == ["step-40", "step-50"]


@pytest.fixture
def clean_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what a scheduler around the tests has set."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "JOB_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.mark.usefixtures("clean_launchers")
def test_an_array_of_tasks_and_the_one_that_was_lost(root: Path, path: str) -> None:
    step = shutil.copytree(root / "step-10", root.parent / "step-10")  # WORK has words, not spaces
    script = str(JOBS / "parts.sbatch")
    work = {"WORK": f"verify {step}", "PARTS": "3", "SLURM_ARRAY_TASK_STEP": "1"}
    first = {**work, "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_COUNT": "3"}
    for number in ("0", "2"):
        done = run(["bash", script], path, SLURM_ARRAY_TASK_ID=number, **first)
        assert done.returncode == 0, done.stderr
        assert "ok:" not in done.stdout
    told = run(["ftckpt", "verify", str(step), "--finish"], path)
    assert told.returncode == 5
    assert "--array=1, with --part auto/3" in told.stderr
    again = {**work, "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "1"}
    done = run(["bash", script], path, SLURM_ARRAY_TASK_ID="1", **again)
    assert done.returncode == 0, done.stderr
    assert "ok: 4 tensors" in done.stdout


@pytest.mark.usefixtures("clean_launchers")
def test_an_indexed_job(root: Path, path: str) -> None:
    text = (JOBS / "parts-job.yaml").read_text()
    (command,) = re.findall(r"command: \[(.*)\]", text)
    (completions,) = re.findall(r"completions: (\d+)", text)
    words = [word.strip().strip('"') for word in command.split(",")]
    words[words.index(f"auto/{completions}")] = "auto/2"  # the rest as it is
    words[2] = str(root / "step-20")
    ends = [run(words, path, JOB_COMPLETION_INDEX=str(n)) for n in range(2)]
    assert [done.returncode for done in ends] == [0, 0], ends[-1].stderr
    assert "ok: 4 tensors" in ends[-1].stdout


@pytest.mark.usefixtures("clean_launchers")
@pytest.mark.parametrize(
    ("launcher", "names"),
    [
        ("torchrun", ("RANK", "WORLD_SIZE")),
        ("mpirun", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
        ("parallel", ()),
    ],
)
def test_what_starts_processes(
    root: Path, path: str, tmp_path: Path, launcher: str, names: tuple[str, ...]
) -> None:
    """A launcher that starts processes one after the other, with the real one's variables."""
    step = shutil.copytree(root / "step-30", tmp_path / "step-30")
    fake = tmp_path / "bin" / launcher
    if names:
        rank, size = names
        each = f'for n in 0 1; do env {rank}=$n {size}=2 "$@"; done'
        loop = f'while [ "$1" != ftckpt ]; do shift; done; {each}'
    else:
        loop = 'shift; while read -r n; do eval "$(echo "$@" | sed "s/{}/$n/")"; done'
    fake.write_text(f"#!/bin/sh\n{loop}\n")
    fake.chmod(0o755)
    work = {"WORK": f"seal {step}", "PARTS": "2", "LAUNCHER": launcher}
    done = run(["sh", str(JOBS / "parts.sh")], path, **work)
    assert done.returncode == 0, done.stderr
    assert (step / "ftckpt.manifest.json").exists()
    assert "sealed 2 files" in done.stdout


def test_the_nightly_script_tells_once_and_goes_on(root: Path, path: str, tmp_path: Path) -> None:
    told, tier = tmp_path / "told", tmp_path / "tier"
    where = {
        "ROOT": str(root), "TIER": str(tier), "TELL": f"cat >> '{told}'",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }  # fmt: skip
    script = ["sh", str(JOBS / "nightly.sh")]

    def kinds() -> list[tuple[str, str, str]]:
        lines = told.read_text().splitlines() if told.exists() else []
        told.unlink(missing_ok=True)
        found = [json.loads(line) for line in lines]
        return [(one["verb"], one["event"], one["kind"]) for one in found]

    # The tier is not mounted: sync and status say so, and all else is done.
    done = run(script, path, **where)
    assert (done.returncode, done.stdout) == (14, "")
    first = kinds()
    assert ("sync", "raised", "not-found") in first
    assert sorted(one.name for one in root.glob("step-*")) == ["step-30", "step-40", "step-50"]
    tier.mkdir()
    done = run(script, path, **where)
    assert ("sync", "cleared", "not-found") in kinds()
    assert sorted(one.name for one in tier.glob("step-*")) == ["step-30", "step-40", "step-50"]
    again = run(script, path, **where)
    assert kinds() == []
    assert again.returncode == done.returncode


def test_the_nightly_timer_runs_the_script() -> None:
    service = (JOBS / "ftckpt-nightly.service").read_text()
    script = (JOBS / "nightly.sh").read_text()
    for name in ("ROOT", "TIER", "TELL"):
        assert f"{name}=" in service
        assert f"${{{name}:" in script
    assert "SuccessExitStatus=14" in service
    assert "OnCalendar=" in (JOBS / "ftckpt-nightly.timer").read_text()
