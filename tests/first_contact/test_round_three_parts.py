"""Third round: what is taken for nothing, for a step, for the model, and for the whole of a save."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ftckpt.errors import ExitCode

from .lines import printed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OLD = time.time() - 7 * 86400


def aged(path: Path, hours: float = 0) -> None:
    at = OLD + hours * 3600
    for one in (*path.rglob("*"), path):
        os.utime(one, (at, at))


def stored(folder: Path, state: dict[str, object]) -> None:
    """Write a DCP store as torch does."""
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)


def marked(root: Path) -> Path:
    """Return a root that `latest` knows to be empty."""
    root.mkdir()
    assert printed("latest", str(root), "--create-root").code == ExitCode.NOT_FOUND
    return root


# --- a root that is surely empty


def test_dcp_files_below_two_folders_are_not_nothing(tmp_path: Path) -> None:
    root = marked(tmp_path / "R")
    stored(root / "run" / "save-a" / "model", {"w": torch.ones(4)})
    for verb in ("latest", "ls", "verify", "gc"):
        told = printed(verb, str(root), *(("--keep-last", "2") if verb == "gc" else ()))
        assert told.code == ExitCode.UNSUPPORTED, verb
        assert "run/" in told.err, verb


@pytest.mark.parametrize(
    "path, content",
    [
        ("run/a/.metadata", b"\x80\x04\x00\x01"),
        ("run/a/__0_0.distcp", b""),
        ("run/a/.weights/part-0", b"\x00\x01\x02"),
        ("run/__saves__/data", b"\x00\x01\x02"),
        ("run/a/model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        ("run/a/model.safetensors.index.json", b"{}"),
        ("run/a/ftckpt.manifest.json", b"{}"),
        ("run/a/brain.ckpt", b"a counter: 3\n"),
    ],
)
def test_a_name_says_nothing_about_what_is_in_it(tmp_path: Path, path: str, content: bytes) -> None:
    root = marked(tmp_path / "R")
    (root / path).parent.mkdir(parents=True)
    (root / path).write_bytes(content)
    assert printed("latest", str(root)).code == ExitCode.UNSUPPORTED


def test_a_link_to_what_is_not_mounted_is_not_nothing(tmp_path: Path) -> None:
    root = marked(tmp_path / "R")
    (root / "run").mkdir()
    (root / "run" / "saves").symlink_to(tmp_path / "gone")
    assert printed("latest", str(root)).code == ExitCode.UNSUPPORTED


def test_what_tools_leave_is_nothing(tmp_path: Path) -> None:
    root = marked(tmp_path / "R")
    for path in (".git/objects/aa/bb", ".DS_Store", "a/._run.log", "a/.run.py.swp", "a/.nfs0001"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"\x00\x01\x02")
    (root / "a" / ".hydra").mkdir()
    (root / "a" / ".hydra" / "overrides").write_text("- lr=1\n")
    (root / "a" / "run.log").write_text("epoch 1\n")
    assert printed("latest", str(root)).code == ExitCode.NOT_FOUND
