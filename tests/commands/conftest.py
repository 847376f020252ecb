"""A copy of the kept root that a test may damage, and a training that it may run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.commands.golden import RUN
from tests.commands.replay.replaying import SCRIPT

# When the checkpoints seem to have been saved: a checkout gives files any times.
SAVED = 1_700_000_000


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory that holds `run`, a root with the real checkpoints step-1 and step-2."""
    shutil.copytree(RUN, tmp_path / "run")
    for path in (tmp_path / "run").rglob("*"):
        os.utime(path, (SAVED, SAVED))
    return tmp_path


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The file of a training that needs no torch; what it writes lies beside it."""
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    return file
