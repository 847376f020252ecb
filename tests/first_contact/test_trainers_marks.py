"""Marks by which a trainer says whether a step is finished."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ftckpt.errors import ExitCode
from tests.builders.archives import extract
from tests.faults.cli import here
from tests.formats.dcp.writing import DATA as DCP

DATA = Path(__file__).parents[1] / "data" / "first_contact"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root of two finished steps."""
    for step in (5, 10):
        shutil.copytree(DCP / "fsdp2" / "step-3", tmp_path / f"epoch_0_step_{step}")
    return tmp_path


def test_a_step_that_its_trainer_refuses(root: Path) -> None:
    (root / "epoch_0_step_10" / ".incomplete").touch()
    found = here("verify", root / "epoch_0_step_10")
    assert found.code == ExitCode.INCOMPLETE
    assert ".incomplete" in found.told
    assert here("inspect", root / "epoch_0_step_10").code == ExitCode.INCOMPLETE
    found = here("latest", root)
    assert found.document["path"] == str(root / "epoch_0_step_5")
    assert ".incomplete" in str(found.document["skipped"])


def test_gc_keeps_it_and_counts_it_not(root: Path) -> None:
    (root / "epoch_0_step_10" / ".incomplete").touch()
    done = here("gc", root, "--keep-last", "1", "--min-survivors", "1", "--apply")
    assert done.code == ExitCode.OK
    assert {p.name for p in root.glob("epoch*")} == {"epoch_0_step_5", "epoch_0_step_10"}


def test_what_is_reserved_for_a_step_is_no_step(root: Path) -> None:
    reserved = root / "epoch_0_step_15.reserving-0a1b"
    reserved.mkdir()
    (reserved / ".incomplete").touch()
    assert here("latest", root).document["path"] == str(root / "epoch_0_step_10")


@pytest.mark.skipif(
    find_spec("ftckpt.formats.folders") is None, reason="no format of a folder of parts"
)
def test_a_step_of_automodel_in_parts(tmp_path: Path) -> None:
    extract(DATA / "automodel-incomplete.tar.xz", tmp_path)
    root = tmp_path / "am2"
    assert here("verify", root / "epoch_0_step_10").code == ExitCode.INCOMPLETE
    assert here("latest", root).document["path"] == str(root / "epoch_0_step_5")


def test_a_mark_commits_what_has_no_marker_of_its_own(tmp_path: Path) -> None:
    step = tmp_path / "step-1"
    step.mkdir()
    save_file({"w": torch.ones(2)}, step / "model.safetensors")
    before = here("inspect", step).document["commit"]
    (step / ".complete").touch()
    after = here("inspect", step).document["commit"]
    assert (before["state"], after["state"]) == ("no marker", "committed")
    assert after["marker"] == ".complete"
