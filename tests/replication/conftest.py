"""Small blocks, so that little data has many, and a sealed checkpoint of several files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import ftckpt.digests.blocks
import ftckpt.manifest
import ftckpt.manifest.parse
import ftckpt.replication.carry_files
import ftckpt.replication.damage
import ftckpt.replication.repair
import ftckpt.replication.trusted_manifest
import ftckpt.transfer.staging.local
import ftckpt.verification.blocks
import ftckpt.verification.replica
from tests.commands.golden import RUN
from tests.replication.replicas import sealed

SMALL = 4096


@pytest.fixture(autouse=True)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks of 4 KiB, but for a service where a part of an upload has a least size."""
    if request.node.get_closest_marker("s3"):
        return
    modules: tuple[Any, ...] = (
        ftckpt.digests.blocks,
        ftckpt.manifest,
        ftckpt.manifest.parse,
        ftckpt.replication.damage,
        ftckpt.replication.trusted_manifest,
        ftckpt.replication.carry_files,
        ftckpt.replication.repair,
        ftckpt.transfer.staging.local,
        ftckpt.verification.blocks,
        ftckpt.verification.replica,
    )
    for module in modules:
        monkeypatch.setattr(module, "BLOCK", SMALL)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A DCP checkpoint as torch wrote it: CRC-32s and no manifest."""
    path = tmp_path / "source" / "step-2"
    shutil.copytree(RUN / "step-2", path)
    return path


@pytest.fixture
def source(plain: Path) -> Path:
    """The same, sealed."""
    return sealed(plain)
