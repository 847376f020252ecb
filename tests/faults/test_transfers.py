"""What reshard, convert and copy end with when something goes wrong around them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cli import Done, apart, command, held, here
from tests.faults.conftest import Answer
from tests.faults.place import ALWAYS, Place
from tests.faults.test_environment import LIMITS, POOR, many_files
from tests.faults.test_meanwhile import CHANGES, during, remove
from tests.faults.test_storage import Failing
from tests.killing import kill_points
from tests.servers.faults import Fault

Install = Callable[[Answer], None]
WORDS = {"reshard": ["--dp", "2"], "convert": ["--to", "safetensors"], "copy": []}
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(params=WORDS)
def verb(request: pytest.FixtureRequest) -> str:
    """Each of the verbs that write a checkpoint from another."""
    return str(request.param)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the result goes, in a directory of its own."""
    (tmp_path / "results").mkdir()
    return tmp_path / "results" / "out"


def _words(place: Place, verb: str, out: Path) -> list[str]:
    return [verb, place.newest, str(out), *WORDS[verb], *place.flags]


def _run(place: Place, verb: str, out: Path, code: int) -> Done:
    """Run it: it ends with `code`; the source is as it was, the result is whole or not there."""
    before = place.state()
    done = here(*_words(place, verb, out))
    assert done.code == code, done.stderr
    assert place.state() == before
    assert out.exists() == (code == 0)
    if code == 0:
        assert os.listdir(out.parent) == ["out"]
        assert here("verify", out, "--level", "content").document["evidence"] == "manifest"
    return done


def test_f1_one_failure_of_any_read_is_survived(
    local: Place, verb: str, out: Path, system: Install
) -> None:
    failing = Failing(local.newest, 0, errno.EIO)
    system(failing)
    _run(local, verb, out, 0)
    for at in {1, 2, 3, failing.calls // 2, failing.calls}:
        system(Failing(local.newest, at, errno.EIO))
        done = here(*_words(local, verb, out.with_name(f"out{at}")))
        assert done.code == 0, (at, done.stderr)


@pytest.mark.s3
def test_f1_one_failure_of_a_request_is_survived(s3: Place, verb: str, out: Path) -> None:
    s3.wire.faults = [
        Fault("list-type", status=503),
        Fault("^GET .*step-2.*metadata", cut="reset", at=100),
        Fault("^GET .*distcp", status=500, code="InternalError"),
    ]
    _run(s3, verb, out, 0)
    assert [fault.times for fault in s3.wire.faults] == [0, 0, 0]


def test_f2_failure_that_lasts(local: Place, verb: str, out: Path, system: Install) -> None:
    counting = Failing(local.newest, 0, 0)
    system(counting)
    assert here(*_words(local, verb, out.with_name("whole"))).code == 0
    for at in (1, 3, counting.calls // 3):
        system(Failing(local.newest, at, errno.EIO, lasting=True))
        _run(local, verb, out, 10)


@pytest.mark.s3
@pytest.mark.parametrize("fault", [{"status": 503}, {"cut": "close", "at": 90}], ids=["f2", "f3"])
def test_requests_that_fail_for_good(
    s3: Place, verb: str, out: Path, fault: Mapping[str, Any]
) -> None:
    s3.wire.faults = [Fault("^GET .*distcp", ALWAYS, **fault)]
    done = here(*_words(s3, verb, out))
    assert done.code == 10, done.stderr
    assert not out.exists()


def test_f4_no_space_anywhere(
    local: Place, verb: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pwrite", "ftruncate", "write"):

        def full(*given: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            _run(local, verb, out, 12)
    _run(local, verb, out, 0)


def test_f5_no_permission(local: Place, verb: str, out: Path, system: Install) -> None:
    system(Failing(f"{local.newest}/__0_0.distcp", 2, errno.EACCES, lasting=True))
    _run(local, verb, out, 11)


def test_f5_no_permission_to_write(
    local: Place, verb: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(path: Any, *more: Any, **named: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    done = _run(local, verb, out, 11)
    assert str(out.parent) in done.told


def test_f6_killed_at_any_change_and_run_again(local: Place, verb: str, out: Path) -> None:
    # Each run goes on where the last was killed; every change is tried in tests/transfer.
    def work() -> None:
        assert here(*_words(local, verb, out)).code == 0

    points = 0
    for point in kill_points(work, each=True):
        points = point
        assert not out.exists() or here("verify", out, "--level", "content").code == 0
    assert points > 10
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_f7_a_signal(place: Place, verb: str, out: Path, number: signal.Signals, code: int) -> None:
    limit = ["--limit-rate", "100B/s", "--no-proof"]
    if place.proxy is not None:
        limit = []
        place.wire.faults = [Fault("^GET .*step-2.*distcp", ALWAYS, cut="stall", at=10)]
    with subprocess.Popen(
        [*command(*_words(place, verb, out), *limit), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as process:
        end = time.monotonic() + 60
        while not any(out.parent.iterdir()) and not (place.proxy and place.wire.seen("distcp")):
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert held(process.returncode, stdout, stderr).code == code
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "at"), [*((one, "__0_1.distcp") for one in CHANGES), (remove, ".metadata")]
)
def test_f15_the_source_changes_meanwhile(
    place: Place, verb: str, out: Path, system: Install, change: Callable[[Place], None], at: str
) -> None:
    # The first read of the metadata recognises the format, before the files are listed.
    after = 1 if at == ".metadata" else 0
    happened = during(place, system, at, lambda: change(place), after=after)
    done = here(*_words(place, verb, out))
    assert len(happened) > after
    assert done.code == 5, done.stderr
    assert not out.exists()


def test_f9_a_flipped_bit(place: Place, verb: str, out: Path) -> None:
    place.flip("step-2/__0_1.distcp", -4000)
    done = here(*_words(place, verb, out))
    assert done.code in (4, 7), done.stderr
    assert not out.exists()


@pytest.mark.parametrize("kind", ["fifo", "dangling"])
def test_f18_a_member_that_is_no_file(local: Place, verb: str, out: Path, kind: str) -> None:
    victim = Path(local.newest, "__0_1.distcp")
    victim.unlink()
    os.mkfifo(victim) if kind == "fifo" else victim.symlink_to("nowhere")
    _run(local, verb, out, 7 if kind == "fifo" else 4)


def test_f18_a_link_in_the_place_of_what_is_written(local: Place, verb: str, out: Path) -> None:
    elsewhere = out.with_name("elsewhere")
    elsewhere.mkdir()
    for name in ("out", ".out.ftckpt-staging"):
        link = out.with_name(name)
        link.symlink_to(elsewhere)
        assert here(*_words(local, verb, out)).code == 8
        assert os.listdir(elsewhere) == []
        link.unlink()


def test_f23_little_memory_and_few_handles(tmp_path: Path, out: Path) -> None:
    path = many_files(tmp_path / "many")
    limited = ["bash", "-c", LIMITS, "limited"]
    done = apart("reshard", path, out, "--max-shard-size", "64", before=limited)
    assert done.code == 0, done.stderr


def test_f24_a_poor_environment_changes_nothing(place: Place, verb: str, out: Path) -> None:
    environment = {k: v for changes in POOR.values() for k, v in changes.items()}
    done = apart(*_words(place, verb, out), cwd=Path("/"), **environment)
    assert done.code == 0, done.stderr


def test_f24_nobody_reads_the_answer(local: Place, verb: str, out: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        command(*_words(local, verb, out)),
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert done.returncode == 141, done.stderr
    assert here("verify", out, "--level", "content").code == 0
