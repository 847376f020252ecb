"""The ledger where something goes wrong beside it: a full disk, failing calls, two writers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ftckpt.discovery.ledger import KeptVerdict, Ledger, parse
from ftckpt.own_files import is_leftover
from ftckpt.storage import open_store
from tests.builders.checkpoints import save_dcp
from tests.discovery.test_ledger import REUSE, latest, verdict_of
from tests.faults.cli import here
from tests.faults.conftest import Answer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        save_dcp(tmp_path / "run" / f"step-{step}", step=step)
    return tmp_path / "run"


def test_a_full_disk_fails_nothing_and_leaves_nothing_that_is_believed(
    root: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no filesystem may be mounted here")
    try:
        shutil.copytree(root, disk / "run")
        filler = disk / "filler"
        with suppress(OSError):
            filler.write_bytes(bytes(1 << 20))
        assert os.statvfs(disk).f_bavail == 0
        found = latest(disk / "run", *REUSE)
        assert (found["result"]["code"], found["step"]) == (0, 2)
        assert "is not remembered" in found["stderr"]
        done = here("verify", disk / "run" / "step-2", "--remember")
        assert done.code == 0
        assert "is not remembered" in done.stderr
        assert not list(disk.rglob("*.json"))
        assert not [p for p in disk.rglob("*") if p.is_file() and is_leftover(p.name)]
        filler.unlink()
        assert latest(disk / "run", *REUSE)["remembered"] == []
        assert len(latest(disk / "run", *REUSE)["remembered"]) == 1
        # Full again, and the verdict is too old to hold: it is not cut by being written anew.
        before = verdict_of(disk / "run").read_bytes()
        with suppress(OSError):
            filler.write_bytes(bytes(1 << 20))
        for level in ("content", "values"):
            found = latest(disk / "run", "--level", level, "--reuse", "0.001s")
            assert (found["result"]["code"], found["remembered"]) == (0, [])
        assert verdict_of(disk / "run").read_bytes() == before
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("verb", ["latest", "verify"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_verdict_that_cannot_be_written_at_any_call(
    root: Path, verb: str, error: int, system: Callable[[Answer], None]
) -> None:
    latest(root, *REUSE)
    path = verdict_of(root)
    os.utime(root / "step-2" / "__0_0.distcp", (1, 1))  # what was remembered holds no more
    reuse: list[str | Path] = ["latest", root, *REUSE]
    words = reuse if verb == "latest" else ["verify", root / "step-2", "--remember"]
    before = path.read_bytes()
    # A reader that closes a file is told of no write that failed.
    opened: set[int] = set()
    for call in ("open", "write", "half a write", "fsync", "close", "rename"):

        def answer(name: str, does: Callable[..., Any], given: tuple[Any, ...]) -> Any:
            if name == "open":
                if not given[1] & os.O_CREAT:
                    return does(*given)
                if call != "open":  # noqa: B023
                    opened.add(fd := does(*given))
                    return fd
            if name == "write" and call == "half a write" and len(given[1]) > 200:  # noqa: B023
                return does(given[0], given[1][: len(given[1]) // 2])
            is_written = name == "close" and given[0] in opened
            opened.difference_update(given[:1] if is_written else ())
            fails = name == call.rpartition(" ")[2]  # noqa: B023
            if not fails or (name == "close" and not is_written):
                return does(*given)
            if name == "close":
                does(*given)
            raise OSError(error, os.strerror(error))

        opened.clear()
        system(answer)
        done = here(*words)
        assert done.code == 0, (call, done.stderr)
        assert "is not remembered" in done.stderr, call
        assert path.read_bytes() == before
        system(lambda _, does, given: does(*given))
        assert "was not read" not in here(*reuse).stderr
        path.write_bytes(before)


def test_two_writers_at_once_both_survive(root: Path) -> None:
    verdicts = [
        KeptVerdict("step-2", "content", 0, "x" * (1 + 3000 * n), "crc32", 1, 1.0, 1.0, "f", "me")
        for n in range(2)
    ]
    path = verdict_of(root)
    failed: list[BaseException] = []
    barrier = threading.Barrier(3)

    def write(verdict: KeptVerdict) -> None:
        try:
            ledger = Ledger(open_store(str(root)), "")
            barrier.wait()
            for _ in range(200):
                ledger.write("step-2", verdict)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(one,)) for one in verdicts]
    for thread in threads:
        thread.start()
    barrier.wait()
    seen = 0
    while any(thread.is_alive() for thread in threads) or not seen:
        with suppress(FileNotFoundError):
            assert parse(path.read_bytes()) in verdicts  # whole, at every instant
            seen += 1
    for thread in threads:
        thread.join()
    assert failed == []
    assert parse(path.read_bytes()) in verdicts
    assert os.listdir(path.parent) == [path.name]


def test_two_restarts_at_once(root: Path) -> None:
    words = [sys.executable, "-m", "ftckpt", "latest", str(root), "--json", *REUSE]
    started = [
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for one in started:
        out, err = one.communicate(timeout=120)
        assert one.returncode == 0, err
        assert "is not remembered" not in err
        assert json.loads(out)["step"] == 2
    assert len(latest(root, *REUSE)["remembered"]) == 1
    assert os.listdir(verdict_of(root).parent) == [verdict_of(root).name]
