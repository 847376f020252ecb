"""What happens while a verb runs: kills, signals, a trainer that saves (F6, F7, F15, F16)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import NotFoundError
from ftckpt.manifest.parse import parse_manifest
from ftckpt.own_files import SUFFIX, is_leftover
from ftckpt.storage import open_store
from tests import campaign
from tests.commands.golden import RUN
from tests.faults.cli import command, held, here
from tests.faults.conftest import SAVED, Answer
from tests.faults.place import ALWAYS, MANIFEST, Place
from tests.servers.faults import Fault, FaultProxy
from tests.servers.s3 import upload_tree
from tests.workers.forked import run

Install = Callable[[Answer], None]
REPOSITORY = Path(__file__).parents[2]

# Imports once, then forks a run for each command line, which dies at its own write operation.
KILLER = """
import json, os, signal, sys
import ftckpt.commands.seal, ftckpt.storage.local.atomic as atomic
import ftckpt.storage.s3.client as s3client
import ftckpt.storage.s3.store, ftckpt.discovery.resolve, ftckpt.verification
import ftckpt.formats.catalog
from tests.faults.cli import here
import numpy, xxhash, botocore.session, s3fs, aiobotocore.session

count = 0
def step():
    global count
    count += 1
    if count == number:
        os.kill(os.getpid(), signal.SIGKILL)

class System:
    def __getattr__(self, name):
        call = getattr(os, name)
        if name not in ("open", "write", "fsync", "rename", "link", "unlink", "close"):
            return call
        def stepping(*given, **named):
            step()
            got = call(*given, **named)
            step()
            return got
        return stepping

once, ask = s3client.S3Client.once, s3client.S3Client.call
async def stepping_once(self, operation, given):
    step()
    got = await once(self, operation, given)
    step()
    return got
async def stepping_call(self, operation, **given):
    if not operation.startswith(("put", "delete", "create", "upload", "complete", "copy")):
        return await ask(self, operation, **given)
    step()
    got = await ask(self, operation, **given)
    step()
    return got

atomic.os = System()
s3client.S3Client.once, s3client.S3Client.call = stepping_once, stepping_call
for number, line in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = here(*line).code
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def killed(lines: list[list[str]], points: Iterable[int] = range(1, 100)) -> list[int]:
    """Run each command line, killed before or after one of its writes; return how each ended.

    Args:
        lines: one for each run.
        points: at which step each is killed; there is one before each write and one after it.
    """
    numbered = list(zip(points, lines, strict=False))
    done = run([json.dumps(numbered)], os.environ, REPOSITORY, program=KILLER)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def check_after_kill(place: Place, data: dict[str, bytes]) -> None:
    """No manifest or a whole one, leftovers that are named as such, data as it was."""
    names = place.names()
    if MANIFEST in names:
        parse_manifest(place.read(f"step-2/{MANIFEST}"))
    left = set(names) - set(data) - {MANIFEST}
    assert all(map(is_leftover, left))
    verified = here("verify", place.newest)
    assert verified.code == 0
    told = [f["message"] for f in verified.document["findings"] if f["kind"] == "stray-file"]
    if MANIFEST not in names:
        assert len(told) == len(left)
    assert all("killed" in message for message in told)
    # Run again it ends well, with no hand lent, and what it wrote holds.
    assert here("seal", place.newest).code == 0
    assert here("verify", place.newest, "--level", "content").document["evidence"] == "manifest"
    if place.service is not None:  # a probe that the killed run has left is swept up
        assert not any(map(is_leftover, place.names()))
    assert {name: place.read(f"step-2/{name}") for name in data} == data


def data_of(place: Place) -> dict[str, bytes]:
    return {name: place.read(f"step-2/{name}") for name in place.names()}


# Before a write and after one in turn: the steps are odd.
SEAL_KILLS = range(1, 100, campaign.examples(3, 1))


def test_f6_seal_is_killed_at_every_write_on_disk(tmp_path: Path) -> None:
    points = [point for point in SEAL_KILLS if point <= 64]
    places = [Place(str(tmp_path / f"run{point}")) for point in points]
    for place in places:
        shutil.copytree(RUN, place.root)
    ended = killed([["seal", place.newest] for place in places], points)
    kills = ended.index(0)
    assert ended == [-signal.SIGKILL] * kills + [0] * (len(places) - kills)
    assert points[kills] > 12  # before and after open, write, fsync, link, unlink and more
    data = data_of(places[-1])
    data.pop(MANIFEST)
    for place in places:
        check_after_kill(place, data)


@pytest.mark.s3
def test_f6_seal_is_killed_at_every_write_on_s3(s3: Place) -> None:
    points = [point for point in SEAL_KILLS if point <= 16]
    places = [Place(f"{s3.root}-{point}", s3.service) for point in points]
    for place in places:
        upload_tree(RUN / "step-2", place.newest)
    ended = killed([["seal", place.newest] for place in places], points)
    kills = ended.index(0)
    assert ended == [-signal.SIGKILL] * kills + [0] * (len(places) - kills)
    assert (
        points[kills] > 6
    )  # before and after each PUT of the probe, its removal, and the manifest's PUT
    data = data_of(s3)
    for place in places:
        check_after_kill(place, data)


@pytest.mark.s3
def test_f6_a_conversion_to_one_object_is_killed_at_writes_on_s3(s3: Place) -> None:
    source = str(RUN / "step-2")

    def line(folder: str) -> list[str]:
        return ["convert", source, f"{folder}/out.pt", "--to", "torchsave"]

    points = range(1, 34, campaign.examples(6, 1))
    folders = [f"{s3.root}-one/{point}" for point in points]
    ended = killed([line(folder) for folder in folders], points)
    kills = ended.index(0)
    assert ended == [-signal.SIGKILL] * kills + [0] * (len(folders) - kills)
    assert points[kills] > 20
    probes = 0
    for folder in folders[: kills + 1]:
        store = open_store(folder)
        left: set[str] = set()
        with suppress(NotFoundError):
            left = {entry.path for entry in store.walk()}
        probes += any(map(is_leftover, left))
        # The object is not there, or is whole; and the next run leaves nothing else.
        assert "out.pt" not in left or here("verify", line(folder)[2]).code == 0
        assert here(*line(folder)).code in ((0, 8) if "out.pt" in left else (0,))
        assert {e.path for e in store.walk()} == {"out.pt", "out.pt" + SUFFIX}
        assert here("verify", line(folder)[2], "--level", "content").code == 0
    assert probes >= 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("verb", ["verify", "seal"])
def test_f7_a_signal_ends_a_long_read(
    place: Place, verb: str, number: signal.Signals, code: int
) -> None:
    before = place.state()
    limit = ["--limit-rate", "100B/s"]  # ten minutes
    if place.proxy is not None:
        limit = []
        # The connection sits there, as it does when a network dies.
        place.wire.faults = [Fault("^GET .*step-2.*distcp", ALWAYS, cut="stall", at=10)]
    process = subprocess.Popen(
        [*command(verb, place.newest, *limit), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    if place.proxy is None:
        reads = f"/proc/{process.pid}/fd"
        until(lambda: any(b".distcp" in os.fsencode(name) for name in links(reads)))
    else:
        until(lambda: place.wire.seen("^GET .*distcp") > 0)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    done = held(process.returncode, stdout, stderr)
    assert done.code == code
    assert place.state() == before


def links(directory: str) -> list[str]:
    """What a directory of links leads to, of those that are still there."""
    found = []
    for name in os.listdir(directory):
        try:
            found.append(os.readlink(f"{directory}/{name}"))
        except OSError:
            continue
    return found


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that is sure to come."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def during(
    place: Place, system: Install, file: str, act: Callable[[], object], *, after: int = 0
) -> list[int]:
    """Let `act` happen in a read of a file of the newest checkpoint, `after` so many others.

    Returns:
        Where in the file each read began, filled as they come.
    """
    reads: list[int] = []

    def consider(offset: int) -> None:
        reads.append(offset)
        if len(reads) == after + 1:
            act()

    if place.proxy is not None:
        note = FaultProxy.note

        def noted(head: str) -> Fault:
            asked = re.search(rf"GET \S+/step-2/{file}.*bytes=(\d+)", head, re.DOTALL)
            if asked:
                consider(int(asked[1]))
            return note(place.wire, head)

        place.proxy.note = noted  # type: ignore[method-assign]
        return reads

    def answer(name: str, does: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        if name == "preadv":
            path = os.readlink(f"/proc/self/fd/{given[0]}")
            if path.endswith(f"step-2/{file}"):
                consider(given[2])
        return does(*given)

    system(answer)
    return reads


def before_the_last_read(place: Place, system: Install, verb: str, file: str) -> int:
    """How many reads of a file a verb makes before the last, which is of its content."""
    reads = during(place, system, file, lambda: None)
    assert here(*place.words(verb)).code == 0
    return len(reads) - 1


def rewrite(place: Place) -> None:
    """Write a whole file of another step, whose own sums are right."""
    place.write("step-2/__0_0.distcp", place.read("step-1/__0_0.distcp"))


def shorten(place: Place) -> None:
    place.write("step-2/__0_0.distcp", place.read("step-2/__0_0.distcp")[:5000])


def remove(place: Place) -> None:
    place.remove("step-2/__0_0.distcp")


def garble(place: Place) -> None:
    place.write("step-2/__0_0.distcp", place.read("step-2/__0_0.distcp")[::-1])


CHANGES = (rewrite, shorten, remove, garble)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("content", [False, True], ids=["headers", "content"])
@pytest.mark.parametrize("sealed", [False, True], ids=["crc", "manifest"])
def test_f15_a_file_changes_while_verify_reads(
    place: Place, system: Install, change: Callable[[Place], None], sealed: bool, content: bool
) -> None:
    if sealed:
        assert here(*place.words("seal")).code == 0
    after = before_the_last_read(place, system, "verify", "__0_1.distcp") if content else 0
    happened = during(place, system, "__0_1.distcp", lambda: change(place), after=after)
    done = here(*place.words("verify"))
    assert happened
    assert done.code == 5, (done.stderr, done.document["findings"])
    assert "changed-file" in done.kinds


@pytest.mark.parametrize("change", CHANGES)
def test_f15_a_file_changes_while_it_is_sealed(
    place: Place, system: Install, change: Callable[[Place], None]
) -> None:
    happened = during(place, system, "__0_1.distcp", lambda: change(place))
    done = here(*place.words("seal"))
    assert happened
    assert done.code == 5, done.stderr
    assert MANIFEST not in place.names()


@pytest.mark.parametrize("change", CHANGES)
def test_f15_a_newest_that_is_still_written_is_not_taken(
    place: Place, system: Install, change: Callable[[Place], None]
) -> None:
    last = before_the_last_read(place, system, "latest", "__0_1.distcp")
    reads = during(place, system, "__0_1.distcp", lambda: change(place), after=last)
    done = here(*place.words("latest"))
    assert len(reads) > last
    assert (done.code, done.document["step"]) == (0, 1), done.stderr
    assert [s["name"] for s in done.document["skipped"]] == ["INCOMPLETE"]


def test_f15_a_trainer_that_removes_the_whole_checkpoint(place: Place, system: Install) -> None:
    def rotate() -> None:
        for name in place.names():
            place.remove(f"step-2/{name}")
        if place.service is None:
            Path(place.newest).rmdir()

    happened = during(place, system, "__0_1.distcp", rotate)
    done = here(*place.words("verify"))
    assert happened
    assert done.code == 5, done.stderr


def test_f15_a_new_save_beside_it_disturbs_nobody(place: Place, system: Install) -> None:
    def save() -> None:
        place.write("step-3/__0_0.distcp", b"begun")

    during(place, system, ".metadata", save)
    for verb in ("verify", "inspect", "latest"):
        done = here(*place.words(verb))
        assert (done.code, done.document["step"]) == (0, 2), done.stderr


@pytest.mark.parametrize("racers", [3])
def test_f16_two_seals_at_once(place: Place, racers: int) -> None:
    place.flags = []
    processes = [
        subprocess.Popen(
            [*command("seal", place.newest), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        for _ in range(racers)
    ]
    ended = [(p.communicate(timeout=120), p) for p in processes]
    documents = [held(p.returncode, out, err) for (out, err), p in ended]
    assert [d.code for d in documents] == [0] * racers, [d.stderr for d in documents]
    assert any(d.document["written"] for d in documents)
    assert [n for n in place.names() if "ftckpt" in n] == [MANIFEST]
    assert json.loads(place.read(f"step-2/{MANIFEST}"))["step"] == 2
    assert here("verify", place.newest).document["evidence"] == "manifest"


def test_times_are_old_enough_to_tell_a_change(local: Place) -> None:
    assert {p.stat().st_mtime for p in Path(local.newest).iterdir()} == {SAVED}
