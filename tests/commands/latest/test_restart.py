"""`ftckpt restart`, on roots that real frameworks wrote, and with real damage."""

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

import ftckpt as api
from ftckpt.storage import open_store
from tests.builders.checkpoints import flip, save_dcp
from tests.builders.real_sets import real_set
from tests.test_docs import validate
from tests.workers.forked import run

JOBS = Path(__file__).parents[3] / "docs" / "jobs"


@pytest.fixture
def deepspeed(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of ZeRO 2 on two ranks, whose newest is damaged."""
    root = tmp_path / "run 7"
    shutil.copytree(real_set("ds_z2_w2_bf16", "", tmp_path_factory), root)
    shutil.copytree(root / "global_step3", root / "global_step2")
    file = next((root / "global_step3").glob("*optim_states.pt"))
    flip(file, file.stat().st_size // 2)
    return root


def restart(root: Path | str, *flags: str) -> dict[str, Any]:
    done = run(["restart", str(root), "--json", *flags], os.environ)
    document = json.loads(done.stdout)
    validate(document)
    assert document["result"]["code"] == done.returncode
    return dict(document) | {"stderr": done.stderr}


def test_what_loads_at_any_world_is_printed_as_it_is(tmp_path: Path) -> None:
    for step in (1, 2):
        save_dcp(tmp_path / f"step-{step}", step=step)
    file = tmp_path / "step-2" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    done = run(["restart", str(tmp_path), "--world", "3"], os.environ)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/step-1\n")
    assert "skipped (CORRUPT)" in done.stderr


def test_the_world_that_wrote_it_needs_no_resharding(deepspeed: Path) -> None:
    found = restart(deepspeed, "--world", "2")
    assert (found["path"], found["grid"]) == (f"{deepspeed}/global_step2", {})


def test_another_world_is_resharded_once(deepspeed: Path, tmp_path: Path) -> None:
    flags = ("--world", "4", "--scratch", str(tmp_path / "new" / "scratch"))
    refused = restart(deepspeed, "--world", "4")
    assert (refused["result"]["code"], refused["path"]) == (2, None)
    assert "--scratch" in refused["result"]["hint"]
    found = restart(deepspeed, *flags)
    assert found["path"].startswith(str(tmp_path / "new" / "scratch" / "world4-"))
    assert found["path"].endswith("/global_step2")
    assert (found["source"], found["grid"]["dp"]) == (f"{deepspeed}/global_step2", 4)
    assert found["proof"] is not None
    made = api.open_checkpoint(found["path"])
    assert (made.topology.world_size, made.step) == (4, 3)
    again = restart(deepspeed, *flags)
    assert again["path"] == found["path"]
    assert "an earlier run has made" in again["stderr"]
    assert "files" not in again  # nothing was written
    file = next(Path(found["path"]).glob("*optim_states.pt"))
    flip(file, file.stat().st_size // 2)
    damaged = restart(deepspeed, *flags)
    assert (damaged["result"]["code"], damaged["path"]) == (8, None)
    # The same step saved anew is another source.
    state = next((deepspeed / "global_step2").glob("*model_states.pt"))
    os.utime(state)
    assert restart(deepspeed, *flags)["path"] not in (None, found["path"])


def test_a_job_with_a_reader_takes_it_as_it_is(tmp_path: Path) -> None:
    """Two ranks of ZeRO wrote it; four load it by `ftckpt.torch.Reader`, and nothing is written."""
    root = tmp_path / "run"
    data = Path(__file__).parents[2] / "data" / "deepspeed" / "z2"
    shutil.copytree(data / "global_step2", root / "global_step2")
    world = api.open_checkpoint(str(root / "global_step2")).topology.world_size
    assert world is not None
    found = restart(root, "--world", str(world + 2), "--reader")
    assert (found["path"], found["grid"]) == (f"{root}/global_step2", {})
    assert "Reader loads it as it is" in found["stderr"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    mine = api.restart(str(root), world + 2, reader=True)
    assert (mine.path, mine.grid) == (found["path"], {})


def test_another_grid(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = real_set("mcore_torch_tp2dp2_distopt_bf16", "", tmp_path_factory)
    scratch = ("--scratch", str(tmp_path))
    assert restart(root, "--world", "4", "--tp", "2")["grid"] == {}
    made = api.open_checkpoint(restart(root, "--world", "4", "--tp", "1", *scratch)["path"])
    assert (made.topology.tp, made.topology.world_size) == (1, 4)
    for flags in (["--world", "3"], ["--world", "4", "--tp", "2", "--dp", "3"]):
        assert restart(root, *flags, *scratch)["result"]["code"] == 2


def test_only_a_marked_root_is_a_first_start(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert restart(root, "--world", "2")["result"]["code"] == 15
    root.mkdir()
    assert restart(root, "--world", "2")["result"]["code"] == 15
    assert run(["latest", str(root), "--create-root"], os.environ).returncode == 0
    assert restart(root, "--world", "2")["result"]["code"] == 9


def test_a_part_that_is_required(deepspeed: Path) -> None:
    assert restart(deepspeed, "--world", "2", "--require", "model,optimizer")["path"] is not None
    assert restart(deepspeed, "--world", "2", "--require", "rng")["result"]["code"] == 6


def _started(root: Path, scratch: Path) -> subprocess.Popen[str]:
    """Start a restart that is slow, and return once it has begun to write."""
    words = ["restart", str(root), "--world", "4", "--scratch", str(scratch)]
    process = subprocess.Popen(
        [sys.executable, "-m", "ftckpt", *words, "--limit-rate", "500KB/s", "--reuse", "1h"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    while process.poll() is None and not any(p.is_file() for p in scratch.rglob("*")):
        time.sleep(0.01)
    assert process.poll() is None
    return process


@pytest.fixture
def three_ranks(tmp_path: Path) -> Path:
    """A root of ZeRO 2 on three ranks: a save, and a copy under a name that is not its step."""
    data = Path(__file__).parents[2] / "data" / "deepspeed" / "z2"
    for step in (2, 3):
        shutil.copytree(data / "global_step2", tmp_path / "run" / f"global_step{step}")
    return tmp_path / "run"


def _damage(step: Path) -> None:
    file = next(step.glob("*optim_states.pt"))
    flip(file, file.stat().st_size // 2)


def test_the_check_of_the_choice_is_made_of_what_the_resharding_reads(
    three_ranks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftckpt.verification import records

    checked: list[tuple[str, bool]] = []
    real = records.check_records

    def check(checkpoint: Any, **given: Any) -> Any:
        checked.append((Path(checkpoint.source.url).name, given["seen"] is not None))
        return real(checkpoint, **given)

    monkeypatch.setattr(records, "check_records", check)
    found = api.restart(str(three_ranks), 4, scratch=str(tmp_path / "scratch"), jobs=1)
    assert found.made is not None
    assert checked == [("global_step2", True)]
    # The verdict is kept as that of any check is.
    kept = api.latest(str(three_ranks), level="content", reuse="1h")
    assert [one["level"] for one in kept.remembered or ()] == ["content"]
    # A level that needs the numbers, and a job that takes it as it is, read it for themselves.
    checked.clear()
    api.restart(str(three_ranks), 4, reader=True)
    assert checked == [("global_step2", False)]


def test_damage_that_the_resharding_reads_is_walked_over_and_nothing_of_it_shows(
    three_ranks: Path, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    _damage(three_ranks / "global_step2")
    found = api.restart(str(three_ranks), 4, scratch=str(scratch), jobs=1)
    assert found.path is not None
    assert found.path.endswith("/global_step3")
    assert [(one.code.name, Path(one.path).name) for one in found.selection.skipped] == [
        ("CORRUPT", "global_step2")
    ]
    assert [p.name for p in scratch.iterdir()] == [Path(found.path).parent.name]
    _damage(three_ranks / "global_step3")
    other = tmp_path / "other"
    lost = api.restart(str(three_ranks), 4, scratch=str(other), jobs=1)
    assert (lost.path, lost.code.name) == (None, "CORRUPT")
    assert list(other.iterdir()) == []


def test_a_resharding_that_fails_is_no_verdict_on_the_checkpoint(
    three_ranks: Path, tmp_path: Path
) -> None:
    (tmp_path / "scratch").write_text("")
    found = restart(three_ranks, "--world", "4", "--scratch", str(tmp_path / "scratch"))
    assert found["path"] is None
    assert found["result"]["code"] not in (0, 4, 9)
    assert (found["source"], found["skipped"]) == (f"{three_ranks}/global_step2", [])


def test_two_at_once_and_a_killed_one(deepspeed: Path, tmp_path: Path) -> None:
    shutil.rmtree(deepspeed / "global_step3")
    scratch = tmp_path / "scratch"
    flags = ("--world", "4", "--scratch", str(scratch))
    first = _started(deepspeed, scratch)
    second = restart(deepspeed, *flags)
    assert (second["result"]["code"], second["path"]) == (8, None)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    found = restart(deepspeed, *flags)
    assert found["result"]["code"] == 0
    assert [p.name for p in scratch.iterdir()] == [Path(found["path"]).parent.name]
    assert [p.name for p in Path(found["path"]).parent.iterdir()] == ["global_step2"]


@pytest.mark.parametrize("place", ["local", pytest.param("s3", marks=pytest.mark.s3)])
def test_the_job_script(
    place: str,
    deepspeed: Path,
    tmp_path: Path,
    command_folder: Path,
    request: pytest.FixtureRequest,
) -> None:
    root = str(deepspeed)
    if place == "s3":
        root = request.getfixturevalue("s3_url")
        store = open_store(root)
        for file in sorted(deepspeed.rglob("*")):
            if file.is_file():
                store.put(file.relative_to(deepspeed).as_posix(), file.read_bytes())
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "srun").write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    for one in bin_.iterdir():
        one.chmod(0o755)
    scratch = tmp_path / "scratch"
    more = {
        "PATH": f"{bin_}:{command_folder}:{os.environ['PATH']}",
        "ROOT": root,
        "SCRATCH": str(scratch),
    }
    for gpus, expected in (("2", f"{root}/global_step2"), ("4", f"{scratch}/world4-")):
        done = subprocess.run(
            ["bash", str(JOBS / "restart.sbatch")],
            env=os.environ | more | {"GPUS_PER_NODE": gpus, "SLURM_JOB_ID": "7"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "skipped (CORRUPT)" in done.stderr
        resumed = done.stdout.rstrip("|").rpartition("--resume|")[2]
        assert resumed.startswith(expected)
        assert resumed.endswith("/global_step2")


def test_verb_and_function_make_one_copy(deepspeed: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    flags = ("--world", "4", "--scratch", str(scratch), "--pp", "1")
    found = restart(deepspeed, *flags)
    again = api.restart(str(deepspeed), 4, scratch=str(scratch), pp=1)
    assert (again.path, again.grid) == (found["path"], found["grid"])
    assert len(list(scratch.iterdir())) == 1
