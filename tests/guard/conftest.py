"""A root with sealed steps in supply, and a guard of this process around the light trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftckpt.discovery import root_marker
from ftckpt.guard import watch
from ftckpt.manifest.seal import seal
from ftckpt.operations.opening import open_checkpoint
from ftckpt.storage import StoreOptions
from tests.guard.light_job import Job, verify_here


def write_safetensors(path: Path, number: int) -> None:
    header = {"weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes([number % 251] * 256))


@pytest.fixture(scope="session")
def supply(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sealed checkpoints of steps 1 to 12."""
    place = tmp_path_factory.mktemp("supply")
    for number in range(1, 13):
        step = place / f"step-{number}"
        step.mkdir()
        write_safetensors(step / "model.safetensors", number)
        seal(open_checkpoint(str(step)))
    return place


@pytest.fixture
def job(supply: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A marked root without checkpoints; saves are verified in this process."""
    root = tmp_path / "run 7"
    root.mkdir()
    root_marker.create_root(str(root), StoreOptions())
    monkeypatch.setattr(watch.Verifier, "verify", verify_here)
    monkeypatch.setenv("FAULTS", "{}")
    return Job(supply, root, tmp_path / "log")
