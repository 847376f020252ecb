"""A copy of the kept root that a test may damage, in a directory with a short name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.commands.golden import RUN


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory that holds `run`, a root with the real checkpoints step-1 and step-2."""
    shutil.copytree(RUN, tmp_path / "run")
    return tmp_path
