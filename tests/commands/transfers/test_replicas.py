"""`ftckpt copy` and `ftckpt repair` as a user runs them: answers, refusals, signals, pipes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commands.golden import check_golden, ftckpt
from tests.commands.test_verify import DAMAGE, flip
from tests.test_docs import validate

STEP = "run/step-2"
VICTIM = "__0_1.distcp"


@pytest.fixture
def replica(here: Path) -> Path:
    """A sealed checkpoint, damaged, beside a replica of it."""
    ftckpt("copy", STEP, "replica", cwd=here)
    shutil.copytree(here / "replica", here / "sealed" / "step-2")
    flip(here / "sealed" / "step-2" / VICTIM, DAMAGE)
    return here


def test_copy_says_what_it_checked(here: Path) -> None:
    check_golden("copy.txt", ftckpt("copy", STEP, "out", cwd=here))
    check_golden("copy-sealed.txt", ftckpt("copy", "out", "again", "--no-proof", cwd=here))
    check_golden("copy-there.txt", ftckpt("copy", "out", "again", cwd=here))
    assert sorted(os.listdir(here)) == ["again", "out", "run"]
    assert ftckpt("verify", "again", "--level", "content", cwd=here).returncode == 0


def test_the_newest_into_a_directory_with_what_lies_beside(here: Path) -> None:
    (here / STEP / "notes.md").write_text("loss went up")
    (here / "tier").mkdir()
    done = ftckpt("copy", "run@latest", "tier/", cwd=here)
    check_golden("copy-latest.txt", done)
    assert not (here / "tier/step-2/notes.md").exists()
    done = ftckpt("copy", "run@latest", "tier/all", "--unmanaged", "--json", cwd=here)
    document = json.loads(done.stdout)
    validate(document)
    assert (document["files"], document["left"], document["evidence"]) == (4, [], "crc32")


def test_copy_refuses(here: Path) -> None:
    (here / "out").mkdir()
    for words, code, says in (
        (f"copy {STEP} out", 8, "exists already"),
        ("copy run out/", 2, "run/step-2"),
        ("copy run@7 out/", 9, "no step 7"),
        (f"copy {STEP} out/ --limit-rate none", 2, "none"),
        (f"copy {STEP} out/ --max-memory 1MiB", 12, "--max-memory"),
        (f"repair {STEP} --from run/step-1", 8, "not a replica"),
        (f"repair {STEP} --from absent", 9, "absent"),
        (f"repair absent --from {STEP}", 9, "absent"),
    ):
        done = ftckpt(*words.split(), cwd=here)
        assert done.returncode == code, (words, done.stderr)
        assert says in done.stderr
        assert "Traceback" not in done.stderr
    assert os.listdir(here / "out") == []


def test_a_damaged_source_is_no_copy(replica: Path) -> None:
    check_golden("copy-damaged.txt", ftckpt("copy", "sealed/step-2", "out", cwd=replica))
    assert not (replica / "out").exists()


def test_repair_lists_then_mends(replica: Path) -> None:
    words = ("repair", "sealed/step-2", "--from", "replica")
    check_golden("repair-dry-run.txt", ftckpt(*words, "--dry-run", cwd=replica))
    done = ftckpt(*words, "--json", cwd=replica)
    document = json.loads(done.stdout)
    validate(document)
    assert (document["done"], document["fetched"]) == (True, document["bytes_damaged"])
    assert Path(replica / document["kept"]).is_dir()
    assert ftckpt("verify", "sealed/step-2", "--level", "content", cwd=replica).returncode == 0
    check_golden("repair-sound.txt", ftckpt(*words, cwd=replica))
    # What is kept is no candidate for a restart.
    assert ftckpt("latest", "sealed", cwd=replica).stdout == "sealed/step-2\n"


def test_repair_of_what_both_have_lost(replica: Path) -> None:
    flip(replica / "replica" / VICTIM, DAMAGE + 1)
    done = ftckpt("repair", "sealed/step-2", "--from", "replica", cwd=replica)
    check_golden("repair-both.txt", done)
    done = ftckpt("repair", "sealed/step-2", "--from", "replica", "--json", cwd=replica)
    validate(json.loads(done.stdout))


def test_nobody_can_read_or_write(replica: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("the superuser may do everything")
    (replica / STEP / VICTIM).chmod(0)
    assert ftckpt("copy", STEP, "out", cwd=replica).returncode == 11
    (replica / "sealed").chmod(0o500)
    words = ("repair", "sealed/step-2", "--from", "replica")
    assert ftckpt(*words, cwd=replica).returncode == 11


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A safetensors checkpoint of 200 MiB of which most is holes: four blocks."""
    path = tmp_path / "large"
    path.mkdir()
    count = 50 << 20
    header = json.dumps({"w": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}})
    padded = header.encode().ljust(-(-len(header) // 8) * 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(padded).to_bytes(8, "little") + padded)
        file.truncate(8 + len(padded) + 4 * count)
    return path


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_what_a_second_run_takes_over(large: Path, number: int, code: int) -> None:
    out = large.parent / "out"
    words = [sys.executable, "-m", "ftckpt", "copy", str(large), str(out), "--json", "-j", "1"]
    with subprocess.Popen(
        [*words, "--limit-rate", "150MB/s"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        journal = large.parent / ".out.ftckpt-staging" / "journal.jsonl"
        while not journal.exists() or journal.read_bytes().count(b"\n") < 2:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        stdout, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert json.loads(stdout)["result"]["code"] == code
    assert not out.exists()
    done = subprocess.run(words, capture_output=True, check=True)
    assert json.loads(done.stdout)["taken_over"] >= 64 << 20
    assert sorted(os.listdir(large.parent)) == ["large", "out"]


def test_nobody_reads_the_answer(here: Path) -> None:
    command = f"{sys.executable} -m ftckpt copy {STEP} out | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, cwd=here
    )
    assert done.stdout.strip() in ("0", "141")
    assert "Traceback" not in done.stderr
    assert ftckpt("verify", "out", "--level", "content", cwd=here).returncode == 0


@pytest.mark.s3
def test_from_disk_to_s3_mended_there_and_back(replica: Path, s3_url: str) -> None:
    from tests.servers.s3 import upload_tree

    done = ftckpt("copy", "run@latest", f"{s3_url}/", cwd=replica)
    assert done.returncode == 0, done.stderr
    assert ftckpt("verify", f"{s3_url}/step-2", "--level", "content").returncode == 0
    upload_tree(replica / "sealed" / "step-2", f"{s3_url}/damaged")
    words = ("repair", f"{s3_url}/damaged", "--from", "replica")
    assert ftckpt(*words, cwd=replica).returncode == 2
    done = ftckpt(*words, "--to", f"{s3_url}/mended", cwd=replica)
    assert done.returncode == 0, done.stderr
    done = ftckpt("copy", f"{s3_url}/mended", "back", cwd=replica)
    assert done.returncode == 0, done.stderr
    assert ftckpt("verify", "back", "--level", "content", cwd=replica).returncode == 0


def test_a_delta_is_copied_with_what_it_is_upon(here: Path) -> None:
    made = ftckpt("delta", "pack", "run/step-1", STEP, "run/step-3", cwd=here)
    assert made.returncode == 0, made.stderr
    (here / "tier").mkdir()
    alone = ftckpt("copy", "run/step-3", "tier/alone", "--json", cwd=here)
    assert json.loads(alone.stdout)["bases"] == []
    done = ftckpt("copy", "run/step-3", "tier/", "--include-bases", "--json", cwd=here)
    document = json.loads(done.stdout)
    validate(document)
    assert [base["destination"] for base in document["bases"]] == ["tier/step-1"]
    shutil.rmtree(here / "run")
    assert ftckpt("verify", "tier/step-3", "--level", "content", cwd=here).returncode == 0
    again = ftckpt("diff", "tier/step-3", "tier/step-1", "--json", cwd=here)
    assert again.returncode == 3, again.stderr  # its tensors can be read: the base was found
