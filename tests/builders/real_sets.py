"""Checkpoints that real frameworks wrote, unpacked once a run; tests skip where they are absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders.archives import extract

ARCHIVES = Path(__file__).parents[3] / "shared" / "checkpoints"

_unpacked: dict[str, Path] = {}


def real_set(name: str, inside: str, temporary: pytest.TempPathFactory) -> Path:
    """Return a place inside the `ckpt` folder of one set."""
    if name not in _unpacked:
        archive = ARCHIVES / f"{name}.tar.xz"
        if not archive.exists():
            pytest.skip(f"no real checkpoints at {ARCHIVES}")
        folder = temporary.mktemp(name)
        extract(archive, folder)
        _unpacked[name] = folder / name / "ckpt"
    return _unpacked[name] / inside
