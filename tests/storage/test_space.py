"""Whether a filesystem takes more bytes, asked of real ones."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ftckpt.storage.local.writable import full_because

ASK = (
    "import sys; from ftckpt.storage.local.writable import full_because;"
    "print(full_because(sys.argv[1], 1 << 20))"
)


def test_a_directory_with_room_is_left_as_it_was(tmp_path: Path) -> None:
    assert full_because(str(tmp_path), 1 << 20) == ""
    assert list(tmp_path.iterdir()) == []
    assert full_because(str(tmp_path / "absent"), 1 << 20) == ""


def test_a_small_filesystem_is_full(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=512k none "{tmp_path}"'
    unshare = shutil.which("unshare")
    line = [unshare or "", "-m", "sh", "-c"]
    if unshare is None or subprocess.run([*line, mount], capture_output=True).returncode:
        pytest.skip("no filesystem can be mounted here")
    asked = subprocess.run(
        [*line, f'{mount} && exec "$@"', "sh", sys.executable, "-c", ASK, str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert asked.stdout.strip() == "no space is left on the device"


@pytest.mark.parametrize("at", ["write", "fsync"])
def test_a_quota_shows_when_it_is_written_or_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, at, refuse)
    assert full_because(str(tmp_path), 1 << 20) == "the quota is used up"


def test_without_files_that_have_no_name_the_free_blocks_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "open", refuse)
    assert full_because(str(tmp_path), 1 << 20) == ""
    assert full_because(str(tmp_path), 1 << 60) == "no space is left on the device"
