"""`ftckpt reshard` and `ftckpt convert` as a user runs them: answers, refusals, signals, pipes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.commands.golden import check_golden, ftckpt
from tests.commands.test_verify import DAMAGE, flip

STEP = "run/step-2"


def _bytes(path: Path) -> Mapping[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A safetensors file of 24 MiB: slow enough, at a limited rate, to be stopped on the way."""
    import numpy as np
    from safetensors.numpy import save_file

    path = tmp_path / "large"
    path.mkdir()
    state = {f"w{i}": np.full((1 << 20,), i, np.float32) for i in range(6)}
    save_file(state, path / "model.safetensors")
    return path


def test_convert_says_what_it_wrote_and_proved(here: Path) -> None:
    before = _bytes(here / "run")
    check_golden("convert.txt", ftckpt("convert", STEP, "out", "--to", "safetensors", cwd=here))
    assert _bytes(here / "run") == before
    done = ftckpt("verify", "out", "--level", "content", cwd=here)
    assert done.returncode == 0, done.stderr
    back = ftckpt("convert", "out", "back", "--to", "dcp", cwd=here)
    assert back.returncode == 0, back.stderr
    assert sorted(os.listdir(here)) == ["back", "out", "run"]


def test_convert_says_what_a_cast_changed(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    values = np.array([1.0, -0.0, np.inf, np.nan, 1 / 3, 1e30, 65504.0, 1e-9], np.float32)
    save_file({"w": values, "ids": np.arange(3)}, tmp_path / "one.safetensors")
    lines = {}
    for dtype in ("bf16", "fp16", "fp32"):
        to = ("--to", "safetensors", "--dtype", dtype)
        done = ftckpt("convert", "one.safetensors", dtype, *to, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (lines[dtype],) = [one for one in done.stdout.splitlines() if one.startswith("proven")]
    rest = "; 1 tensor and 0 objects equal the source bit for bit; 40 B compared"
    assert lines["bf16"].startswith(
        f"proven: 1 tensor equal the source cast to bfloat16 (4 of 8 values changed){rest}"
    )
    assert "cast to float16 (3 of 8 values changed, 1 from finite to infinite);" in lines["fp16"]
    assert "2 tensors, 56 B, and 0 objects equal the source bit for bit" in lines["fp32"]
    more = ("--to", "safetensors", "--dtype", "bf16", "--json")
    done = ftckpt("convert", "one.safetensors", "json", *more, cwd=tmp_path)
    cast = json.loads(done.stdout)["proof"]["cast"]
    assert cast == {
        "tensors": 1, "dtypes": ["bfloat16"], "values": 8, "changed": 4, "infinite": 0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("to", "code", "message"),
    [
        ("safetensor", 2, "did you mean safetensors?"),
        ("nothing", 2, "--to takes one of dcp, safetensors, torchsave"),
        ("bundle", 13, "--to takes one of dcp, safetensors, torchsave"),
    ],
)
def test_a_format_that_is_mistyped_or_not_written(
    here: Path, to: str, code: int, message: str
) -> None:
    done = ftckpt("convert", STEP, "out", "--to", to, cwd=here)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert "safetensors, torchsave, ranks" in ftckpt("convert", "--help", cwd=here).stdout


def test_reshard_for_more_ranks(here: Path) -> None:
    check_golden("reshard.txt", ftckpt("reshard", STEP, "four", "--dp", "4", cwd=here))
    assert sum(p.suffix == ".distcp" for p in (here / "four").iterdir()) == 4


def test_a_dry_run_writes_nothing(here: Path) -> None:
    done = ftckpt("reshard", STEP, "two", "--dp", "2", "--dry-run", "-j", "2", cwd=here)
    check_golden("reshard-dry-run.txt", done)
    assert os.listdir(here) == ["run"]


def test_one_file_and_its_manifest(here: Path) -> None:
    done = ftckpt("convert", STEP, "one.pt", "--to", "torchsave", cwd=here)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(here)) == ["one.pt", "one.pt.ftckpt.json", "run"]
    again = ftckpt("convert", STEP, "one.pt", "--to", "torchsave", cwd=here)
    assert again.returncode == 8
    import torch

    assert torch.load(here / "one.pt", weights_only=True)


def test_one_file_of_weights(here: Path) -> None:
    words = ["convert", STEP, "one.safetensors", "--to", "safetensors"]
    done = ftckpt(*words, cwd=here)
    assert done.returncode == 13, done.stderr
    assert "no place for" in done.stderr
    assert "--only model" in done.stderr
    assert os.listdir(here) == ["run"]
    done = ftckpt(*words, "--only", "model", "--max-shard-size", "1MB", cwd=here)
    assert done.returncode == 2, done.stderr
    done = ftckpt(*words, "--only", "model", cwd=here)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(here)) == ["one.safetensors", "one.safetensors.ftckpt.json", "run"]
    assert ftckpt(*words, "--only", "model", cwd=here).returncode == 8
    from safetensors.torch import load_file

    assert load_file(here / "one.safetensors")
    done = ftckpt("verify", "one.safetensors", "--level", "content", cwd=here)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (f"convert {STEP} run --to safetensors", 8, "exists already"),
        (f"convert {STEP} s3:/no/out --to safetensors", 9, "a URL has two slashes"),
        (f"convert {STEP} run/latest/no/out --to safetensors", 9, "latest is not a directory"),
        ("convert run/step-9 out --to safetensors", 9, "does not exist"),
        ("convert run out --to safetensors", 2, "run/step-1"),
        (f"convert {STEP} out --to tar", 2, "one of dcp"),
        (f"convert {STEP} out --to safetensors --drop nothing.*", 2, "nothing.*"),
        (f"convert {STEP} out --to safetensors --rename absent.toml", 2, "cannot read"),
        (f"convert {STEP} out --to safetensors --names hf", 2, "config.json"),
        (f"convert {STEP} out --to safetensors --max-shard-size many", 2, "many"),
        (f"reshard {STEP} out --like run/step-1", 2, "not laid out by an example"),
        (f"reshard {STEP} out --like run", 2, "is a root"),
        (f"convert {STEP} out --like run/step-9", 9, "does not exist"),
        (f"reshard {STEP} out --dp 0", 2, "dp"),
        (f"reshard {STEP} out --device tpu", 2, "not a device"),
        (f"reshard {STEP} out --device cuda:99", 12, "--device cpu"),
        (f"reshard {STEP} out --rules run/step-1/.metadata", 2, "is not text"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(here: Path, words: str, code: int, says: str) -> None:
    done = ftckpt(*words.split(), cwd=here)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(here) == ["run"]


def test_a_damaged_source_is_no_result(here: Path) -> None:
    os.truncate(here / STEP / "__0_1.distcp", 4000)
    done = ftckpt("convert", STEP, "out", "--to", "safetensors", cwd=here)
    assert done.returncode == 4, done.stderr
    assert not (here / "out").exists()


def test_new_checksums_hide_no_old_damage(here: Path) -> None:
    flip(here / STEP / "__0_1.distcp", DAMAGE)
    done = ftckpt("convert", STEP, "out", "--to", "safetensors", cwd=here)
    check_golden("convert-damaged.txt", done)
    assert os.listdir(here) == ["run"]
    done = ftckpt("convert", STEP, "run", "--to", "safetensors", cwd=here)
    assert done.returncode == 8  # what is known at once is said at once
    done = ftckpt("convert", STEP, "out", "--to", "safetensors", "--no-proof", cwd=here)
    assert done.returncode == 0  # who must have what is left of it says so


def test_nobody_can_read_or_write(here: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("the superuser may do everything")
    (here / STEP / "__0_1.distcp").chmod(0)
    assert ftckpt("convert", STEP, "out", "--to", "safetensors", cwd=here).returncode == 11
    here.chmod(0o500)
    assert ftckpt("reshard", "run/step-1", "out", cwd=here).returncode == 11


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_what_a_second_run_takes_over(large: Path, number: int, code: int) -> None:
    out = large.parent / "out"
    words = [sys.executable, "-m", "ftckpt", "reshard", str(large), str(out)]
    words += ["--max-shard-size", "4MiB", "--json"]
    with subprocess.Popen(
        [*words, "--limit-rate", "4MB/s"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        journal = large.parent / ".out.ftckpt-staging" / "journal.jsonl"
        while not journal.exists() or journal.read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        stdout, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert json.loads(stdout)["result"]["code"] == code
    assert not out.exists()
    done = subprocess.run(words, capture_output=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["taken_over"] >= 8 << 20
    assert document["proof"]["nbytes"] == 24 << 20
    assert sorted(os.listdir(large.parent)) == ["large", "out"]


def test_nobody_reads_the_answer(large: Path) -> None:
    out = large.parent / "out"
    command = f"{sys.executable} -m ftckpt reshard {large} {out} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("0", "141")
    assert "Traceback" not in done.stderr
    assert ftckpt("verify", out, "--level", "content").returncode == 0


def test_a_disk_that_is_full_is_said_before_the_work(large: Path) -> None:
    # A limit on file sizes stands for a quota: the first write beyond it fails.
    out = large.parent / "out"
    command = f"ulimit -f 1024; exec {sys.executable} -m ftckpt reshard {large} {out}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 12, done.stderr
    assert not out.exists()
    assert ftckpt("reshard", large, out).returncode == 0


def test_a_user_may_name_a_directory_with_a_slash(here: Path) -> None:
    done = ftckpt("convert", STEP, "out/", "--to", "safetensors", cwd=here)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(here / "out")
    assert os.listdir(here) == ["run"]


@pytest.mark.s3
def test_from_disk_to_s3_and_back(here: Path, s3_url: str) -> None:
    there = f"{s3_url}/step-2"
    assert ftckpt("convert", STEP, there, "--to", "safetensors", cwd=here).returncode == 0
    assert ftckpt("verify", there, "--level", "content").returncode == 0
    done = ftckpt("convert", there, "back", "--to", "dcp", cwd=here)
    assert done.returncode == 0, done.stderr
    single = ftckpt("convert", STEP, f"{s3_url}/one.pt", "--to", "torchsave", cwd=here)
    assert single.returncode == 0, single.stderr
    assert ftckpt("verify", f"{s3_url}/one.pt", "--level", "content").returncode == 0


def test_every_copy_of_a_plan_is_for_those_who_ask(here: Path) -> None:
    words = ("reshard", "run/step-2", "out", "--dp", "2", "--dry-run")
    short, long = (ftckpt(*words, *more, cwd=here) for more in ((), ("--verbose",)))
    assert "<-" not in short.stdout
    assert long.stdout.count("<-") == 22
    assert "__0_0.distcp: 44.7 KiB, 9 copies" in short.stdout
    assert short.stdout.splitlines()[-1].startswith("would write 3 files, ")
