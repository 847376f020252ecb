"""Seals of what Megatron-Bridge saves, by its own `save_checkpoint`, on the CPU."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import ftckpt
from ftckpt.errors import ExitCode
from ftckpt.own_files import MANIFEST

JOB = Path(__file__).with_name("bridge_job.py")


def is_installed() -> bool:
    """Return whether Megatron-Bridge and the packages that its checkpoints need are there."""
    try:
        return all(find_spec(one) for one in ("megatron.bridge", "megatron.core", "modelopt"))
    except ModuleNotFoundError:
        return False


pytestmark = pytest.mark.skipif(not is_installed(), reason="megatron-bridge is not installed")


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_of_bridge_is_sealed_with_all_its_files(tmp_path: Path, world: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, JOB, tmp_path, str(rank), str(world), str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [one.communicate(timeout=400)[0].decode() for one in ranks]
    assert [one.returncode for one in ranks] == [0] * world, said[0][-2000:]
    for kind in ("sync", "async"):
        root = tmp_path / kind
        path = root / "iter_0000001"
        report = ftckpt.verify(str(path), level="content")
        assert report.code is ExitCode.OK
        listed = {entry["path"] for entry in json.loads((path / MANIFEST).read_text())["files"]}
        assert listed == {f.name for f in path.iterdir()} - {MANIFEST}
        assert listed >= {"run_config.yaml", "train_state.pt", "metadata.json"}
        found = ftckpt.latest(str(root), level="content")
        assert found is not None
