"""Archives of samples, decompressed once for all workers of a run: xz takes longer than a copy."""

from __future__ import annotations

import fcntl
import os
import shutil
import tarfile
from pathlib import Path

# Where the run keeps what it unpacked; `tests/conftest.py` makes the folder and removes it.
PLACE = "TESTS_UNPACKED"


def extract(archive: Path, to: Path) -> None:
    """Put an archive's content below a folder, as files that the caller may change."""
    place = os.environ.get(PLACE)
    if place is None:
        _unpack(archive, to)
        return
    kept = Path(place, str(archive.resolve()).replace("/", "+"))
    with Path(f"{kept}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            unfinished = Path(f"{kept}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            _unpack(archive, unfinished)
            unfinished.rename(kept)
    shutil.copytree(kept, to, symlinks=True, dirs_exist_ok=True)


def _unpack(archive: Path, to: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(to, filter="data")
