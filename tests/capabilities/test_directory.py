"""`doctor` on local directories: what is there, what is absent, and that nothing is left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ftckpt.capabilities import Check, State, examine
from ftckpt.capabilities import directory as doctoring
from ftckpt.errors import NotFoundError, UsageError
from ftckpt.storage.local import folders, pagecache

_KILLED = """
import os, signal, sys
from ftckpt.capabilities import directory
directory._hard_links = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
list(directory.examine_directory(sys.argv[1]))
"""


def place(path: Path) -> dict[str, Check]:
    return {one.name: one for one in examine(str(path)) if one.area == "place"}


def test_a_sound_filesystem_has_no_problem_and_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    found = place(tmp_path)
    names = {
        "filesystem", "reading", "writing", "free space", "locks", "hard links", "rename",
        "rename without replacing", "case", "clock", "page cache",
    }  # fmt: skip
    assert names <= set(found)
    assert [one for one in found.values() if one.state is State.PROBLEM] == []
    assert os.listdir(tmp_path) == ["step-1"]


def test_every_line_says_what_follows(tmp_path: Path) -> None:
    for check in examine(str(tmp_path)):
        assert check.found
        assert check.means
        if check.state is State.PROBLEM:
            assert check.do


def test_what_a_killed_run_left_goes_with_the_next(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, tmp_path], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".ftckpt-tmp-doctor-")
    assert place(tmp_path)["left by a killed doctor"].found == "1 removed"
    assert os.listdir(tmp_path) == []


def test_a_run_at_work_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / ".ftckpt-tmp-doctor-1"
    other.mkdir()
    begun = tmp_path / ".ftckpt-tmp-doctor-2"  # has no lock yet
    begun.mkdir()
    with open(other / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "left by a killed doctor" not in place(tmp_path)
    assert begun.is_dir()
    hours_ago = time.time() - 7200
    os.utime(begun, (hours_ago, hours_ago))
    assert place(tmp_path)["left by a killed doctor"].found == "2 removed"
    assert os.listdir(tmp_path) == []


def test_a_link_of_that_name_is_not_followed(tmp_path: Path) -> None:
    data, root = tmp_path / "data", tmp_path / "root"
    data.mkdir()
    root.mkdir()
    (data / "lock").write_text("")
    (root / ".ftckpt-tmp-doctor-1").symlink_to(data)
    place(root)
    assert os.listdir(data) == ["lock"]


def test_without_locks_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(folders, "renameat2", lambda *_: errno.EINVAL)
    found = place(tmp_path)
    assert found["locks"].state is State.PROBLEM
    assert "mount it with them" in found["locks"].do
    assert found["hard links"].state is State.PROBLEM
    assert found["rename without replacing"].state is State.NOTE
    assert os.listdir(tmp_path) == []


def test_locks_that_hold_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert place(tmp_path)["locks"].found == "held by two at once"


def test_a_clock_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = time.time
    monkeypatch.setattr(time, "time", lambda: plain() + 3600)
    found = place(tmp_path)["clock"]
    assert found.state is State.PROBLEM
    assert found.found.endswith("behind of ours") or "behind" in found.found


def test_names_that_ignore_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "lexists", lambda _: True)
    assert place(tmp_path)["case"].state is State.NOTE


def test_a_full_filesystem(tmp_path: Path) -> None:
    full = os.statvfs_result((4096, 4096, 1000, 10, 10, 1000, 5, 5, 0, 255))
    by_name = {one.name: one for one in doctoring._room(full)}
    assert by_name["free space"].state is State.PROBLEM
    assert by_name["free inodes"].state is State.PROBLEM


def test_before_linux_told_what_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagecache, "_has_dontcache", lambda: False)
    monkeypatch.setattr(pagecache, "is_cached", lambda *_: False)
    monkeypatch.setattr(pagecache, "in_memory", lambda _: False)
    assert place(tmp_path)["page cache"].state is State.NOTE


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is refused to root")
def test_a_directory_that_may_only_be_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert place(tmp_path)["writing"].state is State.NOTE


def test_writing_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refused)
    found = place(tmp_path)
    assert found["writing"].state is State.NOTE
    assert "seal" in found["writing"].means
    assert "locks" not in found


def test_a_place_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotFoundError):
        place(tmp_path / "absent")
    with pytest.raises(UsageError):
        place(tmp_path / "file")


def test_a_checkpoint_that_may_not_be_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step-1").mkdir(mode=0o300)
    (tmp_path / "step-2").mkdir()
    monkeypatch.chdir(tmp_path)  # nobody else may enter the folders above
    tmp_path.chmod(0o755)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            if os.geteuid() == 0:  # root may read everything
                os.setresuid(65534, 65534, 65534)
            found = doctoring._reading(".", ["step-2", "step-1"])
            os.write(write, f"{found.state}, {found.found}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    assert os.read(read, 4096) == b"problem, refused: step-1"
    os.close(read)
