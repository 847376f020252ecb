"""`gc` of a root of four checkpoints: what its plan and its `--apply` end with, cell by cell."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders.checkpoints import save_dcp
from tests.commands.saves import HOUR
from tests.faults.cli import Done, apart, command, here
from tests.faults.conftest import SAVED, Answer
from tests.faults.place import ALWAYS, Place
from tests.servers.faults import Fault, fault_proxy
from tests.servers.s3 import S3Service, upload_tree

KEEP = ("--keep-last", "2")
PLAN: tuple[str, ...] = ()
APPLY = ("--apply",)
BOTH = pytest.mark.parametrize("more", [PLAN, APPLY], ids=["plan", "apply"])
# On a service a run that applies goes through what a plan goes through, first.
ON_EACH = pytest.mark.parametrize(
    ("place", "more"),
    [
        pytest.param("local", PLAN, id="local-plan"),
        pytest.param("local", APPLY, id="local-apply"),
        pytest.param("s3", APPLY, id="s3-apply", marks=pytest.mark.s3),
    ],
    indirect=["place"],
)
Install = Callable[[Answer], None]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four checkpoints, six hours apart."""
    run = tmp_path_factory.mktemp("four")
    for step in (1, 2, 3, 4):
        save_dcp(run / f"step-{step}", step=step)
        for path in [*(run / f"step-{step}").iterdir(), run / f"step-{step}"]:
            os.utime(path, (SAVED + step * 6 * HOUR,) * 2)
    return run


@pytest.fixture
def local(four: Path, tmp_path: Path) -> Place:
    shutil.copytree(four, tmp_path / "run")
    return Place(str(tmp_path / "run"))


@pytest.fixture
def s3(
    four: Path, swift: S3Service, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    upload_tree(four, s3_url)
    with fault_proxy(swift.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield Place(s3_url, swift, proxy, ["--retry-seconds", "0.6"])


def gc(place: Place, *more: str) -> Done:
    return here("gc", place.root, *KEEP, *place.flags, *more)


def data(place: Place) -> dict[str, object]:
    """Everything in the root that is not ftckpt's own."""
    return {k: v for k, v in place.state().items() if "/step-" in k and "/.ftckpt" not in k}


def refused(place: Place, code: int, *more: str) -> Done:
    """Run it; it ends with `code`, and what was saved is as it was."""
    before = data(place)
    done = gc(place, *more)
    assert done.code == code, done.stderr
    assert data(place) == before
    return done


def aged(place: Place) -> None:
    """Wait until nothing was saved in the future: services round times up to whole seconds."""
    if place.service is not None:
        time.sleep(1.1)


def whole(place: Place, *steps: int) -> None:
    """Hold that these checkpoints are there, and pass."""
    for step in steps:
        done = here("verify", f"{place.root}/step-{step}", *place.flags)
        assert done.code == 0, done.stderr


@BOTH
def test_f1_reads_that_fail_once(local: Place, system: Install, more: tuple[str, ...]) -> None:
    failed: set[str] = set()

    def once(name: str, call: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        key = f"{name} {given[0] if given else ''}"
        if name in ("scandir", "lstat", "preadv") and key not in failed:
            failed.add(key)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*given)

    system(once)
    assert gc(local, *more).code == 0
    assert len(failed) > 10
    assert {p.name for p in Path(local.root).glob("step-*")} == (
        {"step-3", "step-4"} if more else {f"step-{n}" for n in (1, 2, 3, 4)}
    )


@BOTH
@pytest.mark.parametrize(("code", "says"), [(errno.EIO, 10), (errno.EACCES, 11)])
@pytest.mark.parametrize("name", ["", "/step-1", "/step-4"])
def test_f2_f5_a_directory_that_cannot_be_listed(
    local: Place, system: Install, name: str, code: int, says: int, more: tuple[str, ...]
) -> None:
    def failing(call: str, real: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        if call == "scandir" and str(given[0]) == local.root + name:
            raise OSError(code, os.strerror(code))
        return real(*given)

    system(failing)
    refused(local, says, *more)


@pytest.mark.s3
@BOTH
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("^GET .*step-4/.metadata", status=503), 0),
        (Fault("^GET .*list-type", status=500), 0),
        (Fault("^GET .*list-type", ALWAYS, status=500), 10),
        (Fault("^GET .*metadata", ALWAYS, status=503), 10),
        (Fault("^GET .*metadata", ALWAYS, cut="close", at=20), 10),
        (Fault("^GET", ALWAYS, status=403, code="AccessDenied"), 11),
    ],
    ids=["f1-read", "f1-list", "f2-list", "f2-read", "f3", "f5"],
)
def test_f1_to_f5_on_s3(s3: Place, fault: Fault, code: int, more: tuple[str, ...]) -> None:
    s3.wire.faults = [replace(fault)]
    if code:
        refused(s3, code, *more)
    else:
        assert gc(s3, *more).code == 0
    assert s3.wire.faults[0].times < fault.times


def test_f4_a_disk_that_is_full(four: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no filesystem may be mounted here")
    try:
        shutil.copytree(four, disk / "run")
        with suppress(OSError):
            (disk / "filler").write_bytes(bytes(1 << 20))
        assert os.statvfs(disk).f_bavail == 0
        place = Place(str(disk / "run"))
        assert gc(place).code == 0
        done = gc(place, "--apply", "--purge-now", "--yes")
        assert done.code == 0, done.stderr
        assert os.statvfs(disk).f_bavail > 0
        whole(place, 3, 4)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@ON_EACH
def test_f9_damage_in_data_is_not_looked_for(place: Place, more: tuple[str, ...]) -> None:
    place.flip("step-1/__0_0.distcp", -40)
    assert gc(place, *more).code == 0


@ON_EACH
def test_f10_damage_in_what_would_be_kept_is_held(place: Place, more: tuple[str, ...]) -> None:
    place.write("step-4/.metadata", place.read("step-4/.metadata")[:100])
    aged(place)
    done = gc(place, *more)
    assert done.code == 0
    decided = {d["name"]: d for d in done.document["plan"]["decisions"]}
    assert decided["step-4"]["entry_class"] in ("CORRUPT", "STAGING")
    assert [name for name, d in decided.items() if not d["keep"]] == ["step-1"]
    whole(place, 2, 3)


def test_f16_a_reader_holds_what_it_reads(place: Place) -> None:
    lease = json.dumps({"holder": "node7", "expires": time.time() + 600}).encode()
    place.write(".ftckpt/leases/step-1/node7.json", lease)
    aged(place)
    done = gc(place, "--apply")
    assert [d["name"] for d in done.document["plan"]["decisions"] if not d["keep"]] == ["step-2"]
    whole(place, 1, 3, 4)


# In 1970 everything is of the future, and held: nothing is left to refuse.
@pytest.mark.parametrize(("past", "code"), [(HOUR, 8), (24 * HOUR, 8), (1e10, 0)])
def test_f17_a_clock_that_went_back(
    local: Place, monkeypatch: pytest.MonkeyPatch, past: float, code: int
) -> None:
    assert gc(local, "--keep-every", "1", "--apply").code == 0
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: max(0.0, now - past))
    refused(local, code, "--apply")


def test_f17_a_clock_that_runs_ahead_frees_nothing_early(
    local: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gc(local, "--apply").code == 0
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert here("gc", "purge", local.root).document["erased"] == []
    assert here("gc", "undelete", local.root, "--all").code == 0
    whole(local, 1, 2, 3, 4)


@pytest.mark.parametrize("kind", ["fifo", "link"])
@BOTH
def test_f18_what_is_no_checkpoint_stays(local: Place, kind: str, more: tuple[str, ...]) -> None:
    strange = Path(local.root, "step-9")
    os.mkfifo(strange) if kind == "fifo" else strange.symlink_to("/usr")
    done = gc(local, *more)
    assert done.code == 0
    named = next(d for d in done.document["plan"]["decisions"] if d["name"] == "step-9")
    assert (named["keep"], named["entry_class"]) == (True, "FOREIGN")
    assert os.path.lexists(strange)


@BOTH
def test_f18_a_link_in_the_place_of_its_own_directory(local: Place, more: tuple[str, ...]) -> None:
    outside = Path(local.root).with_name("outside")
    outside.mkdir()
    Path(local.root, ".ftckpt").symlink_to(outside)
    refused(local, 7, *more)
    assert list(outside.iterdir()) == []


@ON_EACH
def test_f19_to_f22_hostile_headers_are_held(place: Place, more: tuple[str, ...]) -> None:
    pickled = b"\x80\x02cposix\nsystem\nX\x0a\x00\x00\x00touch /owned\x85R."
    place.write("step-4/.metadata", pickled)
    aged(place)
    done = gc(place, *more)
    assert done.code == 0
    decided = {d["name"]: d for d in done.document["plan"]["decisions"]}
    assert decided["step-4"]["keep"]
    assert [name for name, d in decided.items() if not d["keep"]] == ["step-1"]
    assert not Path("/owned").exists()


@BOTH
def test_f23_little_memory_and_few_handles(local: Place, more: tuple[str, ...]) -> None:
    limits = 'ulimit -v 524288 && ulimit -n 64 && exec "$@"'
    done = apart("gc", local.root, *KEEP, *more, before=["bash", "-c", limits, "limited"])
    assert done.code == 0, done.stderr


@ON_EACH
def test_f24_a_poor_place(place: Place, more: tuple[str, ...]) -> None:
    poor = {"HOME": "", "TERM": "", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ("gc", place.root, *KEEP, *place.flags, *more)
    assert apart(*words, cwd=Path("/"), **poor).code == 0


@BOTH
def test_f24_nobody_reads_the_answer(local: Place, more: tuple[str, ...]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        command("gc", local.root, *KEEP, *more),
        stdout=write_end,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        timeout=60,
        check=False,
    )
    os.close(write_end)
    assert done.returncode == 141
    assert done.stderr == b""
    assert gc(local, "--apply").code == 0
    whole(local, 3, 4)
