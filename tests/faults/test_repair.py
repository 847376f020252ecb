"""What repair ends with when something goes wrong around it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cli import apart, command, held, here
from tests.faults.conftest import Answer
from tests.faults.place import ALWAYS, Place
from tests.faults.test_environment import POOR
from tests.faults.test_storage import Failing
from tests.servers.faults import Fault
from tests.servers.s3 import upload_tree

Install = Callable[[Answer], None]
VICTIM = "__0_1.distcp"
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def damaged(tmp_path: Path, local: Place) -> Path:
    """A sealed checkpoint of one damaged file, in a directory of its own."""
    (tmp_path / "work").mkdir()
    path = tmp_path / "work" / "step-2"
    assert here("copy", local.newest, path).code == 0
    shutil.copytree(path, tmp_path / "replica")
    data = bytearray((path / VICTIM).read_bytes())
    data[15_000] ^= 1
    (path / VICTIM).write_bytes(data)
    return path


@pytest.fixture
def replica(damaged: Path, tmp_path: Path) -> Path:
    return tmp_path / "replica"


def _mended(path: Path) -> bool:
    return here("verify", path, "--level", "content").code == 0


def _unreadable(path: str) -> Answer:
    """Return what fails every read of one file."""

    def answer(name: str, call: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        if name == "preadv" and os.readlink(f"/proc/self/fd/{given[0]}") == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*given)

    return answer


def test_f1_one_failure_of_any_read_is_survived(
    damaged: Path, replica: Path, system: Install
) -> None:
    for place in (damaged, replica):
        counting = Failing(str(place), 0, errno.EIO)
        system(counting)
        assert here("repair", damaged, "--from", replica, "--dry-run").code == 0
        for at in {1, 2, counting.calls // 2, counting.calls}:
            system(Failing(str(place), at, errno.EIO))
            done = here(
                "repair", damaged, "--from", replica, "--to", f"{damaged}-{place.name}-{at}"
            )
            assert done.code == 0, done.stderr
            assert done.document["bytes_damaged"] == (replica / VICTIM).stat().st_size


def test_f2_what_cannot_be_read_comes_from_the_replica(
    damaged: Path, replica: Path, system: Install
) -> None:
    system(_unreadable(f"{damaged}/__0_0.distcp"))
    done = here("repair", damaged, "--from", replica)
    assert done.code == 0, done.stderr
    assert {b["file"]: b["why"] for b in done.document["blocks"]} == {
        "__0_0.distcp": "unreadable",
        VICTIM: "differs",
    }
    system(lambda name, call, given: call(*given))
    assert _mended(damaged)


def test_f2_a_replica_that_cannot_be_read(damaged: Path, replica: Path, system: Install) -> None:
    system(_unreadable(f"{replica}/{VICTIM}"))
    assert here("repair", damaged, "--from", replica).code == 10
    assert not _mended(damaged)


def test_f4_no_space(damaged: Path, replica: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (damaged / VICTIM).read_bytes()
    for name in ("pwrite", "ftruncate", "write"):

        def full(*given: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            assert here("repair", damaged, "--from", replica).code == 12
        assert (damaged / VICTIM).read_bytes() == before
    assert here("repair", damaged, "--from", replica).code == 0
    assert _mended(damaged)


def test_f5_no_permission(
    damaged: Path, replica: Path, system: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def mkdir(path: Any, *more: Any, **named: Any) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

        patch.setattr(os, "mkdir", mkdir)
        done = here("repair", damaged, "--from", replica)
        assert done.code == 11
        assert "belongs to" in done.told
        assert "--to" in done.told
    system(Failing(f"{replica}/{VICTIM}", 1, errno.EACCES, lasting=True))
    assert here("repair", damaged, "--from", replica).code == 11


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_f7_a_signal(damaged: Path, replica: Path, number: signal.Signals, code: int) -> None:
    words = command("repair", damaged, "--from", replica, "--json", "--limit-rate", "20KB/s")
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    ) as process:
        end = time.monotonic() + 60
        while not (damaged.parent / ".step-2.ftckpt-staging").exists():
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert held(process.returncode, stdout, stderr).code == code
    assert not _mended(damaged)
    assert here("repair", damaged, "--from", replica).code == 0
    assert _mended(damaged)


@pytest.mark.parametrize("kind", ["fifo", "dangling"])
def test_f18_a_member_that_is_no_file(damaged: Path, replica: Path, kind: str) -> None:
    (damaged / VICTIM).unlink()
    if kind == "fifo":
        os.mkfifo(damaged / VICTIM)
        assert here("repair", damaged, "--from", replica).code == 7
        return
    (damaged / VICTIM).symlink_to("nowhere")  # its bytes are gone: they are missing
    assert here("repair", damaged, "--from", replica).code == 0
    assert not (damaged / VICTIM).is_symlink()
    assert _mended(damaged)


def test_f24_a_poor_environment_changes_nothing(damaged: Path, replica: Path) -> None:
    environment = {k: v for changes in POOR.values() for k, v in changes.items()}
    done = apart("repair", damaged, "--from", replica, cwd=Path("/"), **environment)
    assert done.code == 0, done.stderr
    assert _mended(damaged)


@pytest.mark.s3
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("^GET .*replica.*distcp", status=503), 0),
        (Fault("^GET .*replica.*distcp", cut="flip", at=5000), 0),
        (Fault("^GET .*replica.*distcp", ALWAYS, status=503), 10),
        (Fault("^GET .*replica.*distcp", ALWAYS, cut="close", at=90), 10),
        (Fault("^GET .*replica.*distcp", ALWAYS, cut="flip", at=5000), 4),
    ],
    ids=["f1", "f11", "f2", "f3", "f9"],
)
def test_a_replica_on_a_service(
    s3: Place, damaged: Path, replica: Path, fault: Fault, code: int
) -> None:
    upload_tree(replica, f"{s3.root}/replica")
    s3.wire.faults = [fault]
    done = here("repair", damaged, "--from", f"{s3.root}/replica", *s3.flags)
    assert done.code == code, done.stderr
    assert _mended(damaged) == (code == 0)
