"""`ftckpt latest` in a job script, on roots that torch itself wrote."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.storage import open_store
from tests.workers.forked import run

STEPS = (10, 20, 30)
SCRIPT = 'CKPT=$("$FTCKPT" latest "$ROOT" --level content "$@") || exit $?; printf %s "$CKPT"'


def save(path: Path, step: int) -> None:
    """Let torch save a tiny DCP checkpoint of a step, by one process."""
    import torch
    import torch.distributed.checkpoint.state_dict_saver as dcp

    state = {"model": {"weight": torch.arange(64.0) + step}, "step": step}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves is what is meant
        dcp.save(state, checkpoint_id=path, no_dist=True)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for step in STEPS:
        save(root / f"step-{step}", step)
    return root


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], str]:
    """Return what puts a local root to where the test wants it, and says its URL."""
    if request.param == "local":
        return str
    url: str = request.getfixturevalue("s3_url")

    def upload(root: Path) -> str:
        store = open_store(url)
        for file in sorted(root.rglob("*")):
            if file.is_file():
                store.put(file.relative_to(root).as_posix(), file.read_bytes())
        return url

    return upload


def copied(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run 7")  # a name that a careless script would split
    return tmp_path / "run 7"


def flip(checkpoint: Path) -> None:
    """Flip one bit of a weight."""
    file = checkpoint / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    import struct

    at = data.index(struct.pack("<f", 63.0 + int(checkpoint.name.removeprefix("step-"))))
    data[at] ^= 1
    file.write_bytes(data)


def tear(checkpoint: Path) -> None:
    """Leave a save that was killed before it committed."""
    (checkpoint / ".metadata").unlink()


def shorten(checkpoint: Path) -> None:
    """Lose the end of a data file after the commit."""
    file = checkpoint / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 100)


def job(root: str, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the line of a job script."""
    program = Path(sys.executable).with_name("ftckpt")
    return subprocess.run(
        ["bash", "-c", SCRIPT, "job", *flags],
        env=os.environ | {"ROOT": root, "FTCKPT": str(program)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def latest(root: str, *flags: str, **environment: str) -> tuple[int, dict[str, Any]]:
    done = run(["latest", root, "--json", *flags], os.environ | environment)
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    assert document["result"]["code"] == done.returncode, done.stderr
    return done.returncode, document


Place = Callable[[Path], str]


def test_a_good_root(saved: Path, tmp_path: Path, place: Place) -> None:
    root = place(copied(saved, tmp_path))
    done = job(root)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{root}/step-30", "")


def test_a_corrupt_newest(saved: Path, tmp_path: Path, place: Place) -> None:
    local = copied(saved, tmp_path)
    flip(local / "step-30")
    shorten(local / "step-20")
    root = place(local)
    done = job(root)
    assert (done.returncode, done.stdout) == (0, f"{root}/step-10")
    first, second = done.stderr.splitlines()
    assert first.startswith("skipped (CORRUPT): ")
    assert "step-30" in first
    assert "step-20" in second


def test_a_torn_newest(saved: Path, tmp_path: Path, place: Place) -> None:
    local = copied(saved, tmp_path)
    tear(local / "step-30")
    root = place(local)
    done = job(root)
    assert (done.returncode, done.stdout) == (0, f"{root}/step-20")
    assert "skipped (INCOMPLETE): " in done.stderr


def test_nothing_to_restart_from(saved: Path, tmp_path: Path) -> None:
    root = copied(saved, tmp_path)
    for step in STEPS:
        tear(root / f"step-{step}")
    assert (job(str(root)).returncode, job(str(root)).stdout) == (5, "")
    shutil.copy(saved / "step-10" / ".metadata", root / "step-10")
    flip(root / "step-10")
    done = job(str(root))
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.splitlines()[-1].startswith("ftckpt: ") or "hint: " in done.stderr
    shutil.rmtree(root)
    assert job(str(root)).returncode == 15
    root.mkdir()
    done = job(str(root))
    assert (done.returncode, done.stdout) == (15, "")
    assert "--create-root" in done.stderr
    for flags, code in ((["--create-root"], 0), (["--create-root"], 0), ([], 9)):
        done = job(str(root), *flags)
        assert (done.returncode, done.stdout) == (code, "")


def test_structure_sees_no_flipped_bit(saved: Path, tmp_path: Path) -> None:
    root = copied(saved, tmp_path)
    flip(root / "step-30")
    code, document = latest(str(root))
    assert (code, document["step"], document["level"]) == (0, 30, "structure")
    code, document = latest(str(root), "--level", "content")
    assert (code, document["step"], document["path"]) == (0, 20, f"{root}/step-20")
    assert document["format"] == "dcp"
    (skipped,) = document["skipped"]
    assert skipped["path"] == f"{root}/step-30"
    assert (skipped["code"], skipped["name"], skipped["step"]) == (4, "CORRUPT", 30)
    assert skipped["message"]


def test_content_needs_evidence(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    for step in (1, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"w": np.zeros(3)}, str(tmp_path / f"checkpoint-{step}" / "model.safetensors"))
    assert latest(str(tmp_path))[0] == 0
    code, document = latest(str(tmp_path), "--level", "content")
    assert (code, document["path"]) == (6, None)
    code, document = latest(str(tmp_path), "--level", "content", "--skip-unverified")
    assert code == 6
    assert len(document["skipped"]) == 2


def test_pointers_are_compared(saved: Path, tmp_path: Path) -> None:
    root = copied(saved, tmp_path)
    (root / "latest").write_text("step-20")
    (root / "latest_checkpointed_iteration.txt").write_text("99")
    done = job(str(root))
    assert done.stdout == f"{root}/step-30"
    assert "pointer-disagrees" in done.stderr
    assert "pointer-dangling" in done.stderr
    _, document = latest(str(root))
    by_name = {p["name"]: p for p in document["pointers"]}
    assert by_name["latest"] | {"says": ""} == {
        "name": "latest",
        "says": "",
        "target": "step-20",
        "step": 20,
        "agrees": False,
    }
    assert by_name["latest_checkpointed_iteration.txt"]["target"] is None


def test_names_that_disagree_are_told_once(saved: Path, tmp_path: Path) -> None:
    root = copied(saved, tmp_path)
    for step in STEPS:
        (root / f"step-{step}").rename(root / f"checkpoint_{step // 10}")
    done = job(str(root))
    assert done.stdout == f"{root}/checkpoint_3"
    first, second = done.stderr.splitlines()
    assert first == f"warning: step-name [checkpoint_3]: {root}/checkpoint_3 holds step 30, not 3"
    assert second.startswith("note: 2 other names")
    assert len(latest(str(root))[1]["findings"]) == 3


def test_a_path_reaches_the_shell_byte_for_byte(saved: Path, tmp_path: Path) -> None:
    root = os.fsencode(tmp_path) + b"/r\xc3\xbcn\xff"
    os.mkdir(root)
    shutil.copytree(saved / "step-10", os.fsdecode(root) + "/step-10")
    for locale in ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {}):
        done = subprocess.run(
            [sys.executable, "-m", "ftckpt", "latest", root],
            capture_output=True,
            env=os.environ | locale,
            timeout=60,
            check=True,
        )
        assert done.stdout == root + b"/step-10\n"


def test_a_checkpoint_is_no_root(saved: Path) -> None:
    code, document = latest(str(saved / "step-10"))
    assert (code, document["path"]) == (2, None)
    assert latest(f"{saved}@10")[0] == 2


def test_wait_for_a_save_that_never_ends(saved: Path, tmp_path: Path) -> None:
    root = copied(saved, tmp_path)
    tear(root / "step-30")
    done = job(str(root), "--wait", "--timeout", "100ms")
    assert (done.returncode, done.stdout) == (0, f"{root}/step-20")
    assert "waiting for " in done.stderr
    assert "in vain" in done.stderr


def test_latest_imports_no_torch(saved: Path) -> None:
    script = (
        "import sys\n"
        "from ftckpt.commands.cli.app import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print('torch' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "latest", str(saved), "--level", "content"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == "False\n"


@pytest.mark.s3
def test_an_unreachable_store_is_no_old_checkpoint(saved: Path, s3_url: str) -> None:
    closed = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"}
    done = job(s3_url, "--retry-seconds", "0", **closed)
    assert (done.returncode, done.stdout) == (10, "")


@pytest.mark.s3
def test_wrong_credentials_are_no_empty_root(saved: Path, s3_url: str) -> None:
    done = job(s3_url, AWS_SECRET_ACCESS_KEY="wrong")
    assert (done.returncode, done.stdout) == (11, "")


@pytest.mark.s3
def test_an_empty_prefix_is_a_first_start_only_if_it_is_marked(s3_url: str) -> None:
    done = job(s3_url)
    assert (done.returncode, done.stdout) == (15, "")
    assert job(s3_url, "--create-root").returncode == 0
    assert job(s3_url).returncode == 9


@pytest.mark.s3
def test_a_bucket_that_does_not_exist_is_never_a_first_start(s3_url: str) -> None:
    for flags in ([], ["--create-root"]):
        done = job("s3://no-such-bucket-here/run7", *flags)
        assert (done.returncode, done.stdout) == (15, "")


def test_a_checkpoint_that_is_called_pkl_is_one_of_its_root(tmp_path: Path) -> None:
    """`latest.pkl` is no pointer and no stray file: its step is in its content."""
    import torch

    torch.save({"model": {"w": torch.ones(2)}, "step": 4}, tmp_path / "emergency.pt")
    torch.save({"model": {"w": torch.ones(2)}, "step": 5}, tmp_path / "latest.pkl")
    (tmp_path / "vocabulary.pkl").write_bytes(pickle.dumps({"a": 1}))  # no checkpoint
    done = run(["latest", str(tmp_path)], os.environ)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "latest.pkl"))
