"""One line by a cluster: its answer is that of one machine, and what is lost is done again."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import ExitCode, UnavailableError
from ftckpt.operations.many import cluster
from ftckpt.operations.many.share_process import ShareEnd, ShareFailedError, ShareTask, do_share
from tests.commands.golden import DATA
from tests.replay.test_running import alive

from .answers import answer
from .test_copy import files, records

SOURCE = DATA / "run/step-2"
CONVERT = ("--to", "safetensors", "--max-shard-size", "2000")
_numbers = itertools.count()


class HereEngine:
    """Runs shares in this process, and may be lost.

    Args:
        lost_after: shares; None for never.
    """

    dashboard = "http://127.0.0.1:8787/status"

    def __init__(self, name: str, lost_after: int | None = None) -> None:
        self.name = name
        self.begun: list[int] = []
        self._left = lost_after

    def slots(self) -> int:
        return 1

    def run(self, tasks: Sequence[ShareTask]) -> Iterator[ShareEnd]:
        for task in reversed(tasks):
            if self._left == len(self.begun):
                raise UnavailableError(f"the scheduler of {self.name} is gone")
            self.begun.append(task.number)
            result, document = answer(*task.words)
            plan = document["part"]["plan"] if "part" in document else ""
            yield ShareEnd(task.number, "here", plan, int(result.code), result.message, result.hint)

    def close(self) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> HereEngine:
    made = HereEngine("here")
    monkeypatch.setattr(cluster, "open_engine", lambda text: made)
    monkeypatch.setattr(cluster, "WORTH", 1)
    return made


LINES: dict[str, list[Any]] = {
    "verify": ["verify", SOURCE, "--level", "values"],
    "diff": ["diff", DATA / "run/step-1", SOURCE],
    "convert": ["convert", SOURCE, "{}/made", *CONVERT],
    "copy": ["copy", SOURCE, "{}/made"],
    "delta": ["delta", "pack", DATA / "run/step-1", SOURCE, "{}/made"],
}


@pytest.mark.parametrize("verb", LINES)
def test_the_answer_is_that_of_one_machine(tmp_path: Path, engine: HereEngine, verb: str) -> None:
    places = [tmp_path / name for name in ("alone", "clustered")]
    ends = []
    for place, flags in zip(
        places, ([], ["--cluster", "x", "--parts", tmp_path / "p"]), strict=True
    ):
        words = [str(word).format(place) for word in LINES[verb]]
        ends.append(answer(*words, "-j1", *flags))
    (result, alone), (also, clustered) = ends
    assert also == result
    assert clustered.pop("cluster") == {"name": "here", "shares": 4}
    for one in (alone, clustered):
        for name in ("destination", "break_even"):
            one.pop(name, None)
    assert clustered == alone
    if (places[0] / "made").exists():
        one, two = (files(place / "made") for place in places)
        # A manifest says when it was made.
        assert one == two
        assert len(engine.begun) >= 5  # each is written, and the last one proven by another


def test_a_cluster_that_is_lost_goes_on_by_parts(
    tmp_path: Path, engine: HereEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["convert", SOURCE, tmp_path / "made", *CONVERT]
    lost = HereEngine("lost", lost_after=1)
    with monkeypatch.context() as other:
        other.setattr(cluster, "open_engine", lambda text: lost)
        result, _ = answer(*words, "--cluster", "x")
    assert result.code is ExitCode.UNAVAILABLE
    assert "--part auto/4" in result.hint
    assert "--array=0-2" in result.hint
    assert not (tmp_path / "made").exists()
    assert answer(*words, "--part", "0/4")[0].code is ExitCode.OK
    assert answer(*words, "--cluster", "x", "--shares", "3")[0].code is ExitCode.REFUSED
    assert answer(*words, "--cluster", "x")[0].code is ExitCode.OK
    assert engine.begun[:2] == [2, 1]  # all that was left to write
    assert answer("diff", SOURCE, tmp_path / "made")[0].code is ExitCode.OK


def test_what_ends_a_share_ends_the_run(tmp_path: Path, engine: HereEngine) -> None:
    """Also where it came from another machine: here the destination is taken meanwhile."""
    target = tmp_path / "made"

    class Taken(HereEngine):
        def run(self, tasks: Sequence[ShareTask]) -> Iterator[ShareEnd]:
            target.mkdir(exist_ok=True)
            (target / "x").write_bytes(b"x")
            return super().run(tasks)

    engine.__class__ = Taken
    result, _ = answer("convert", SOURCE, target, *CONVERT, "--cluster", "x")
    assert result.code is ExitCode.REFUSED
    assert "share 3/4 on here" in result.message
    assert engine.begun == [3]


def test_a_worker_with_another_plan(tmp_path: Path, engine: HereEngine) -> None:
    class Other(HereEngine):
        def run(self, tasks: Sequence[ShareTask]) -> Iterator[ShareEnd]:
            yield ShareEnd(0, "n7", "0" * 32, 0, "", "")

    engine.__class__ = Other
    result, _ = answer("verify", SOURCE, "--parts", tmp_path, "--cluster", "x")
    assert result.code is ExitCode.REFUSED
    assert result.message.startswith("n7 makes another plan")


@pytest.mark.parametrize(
    "flag", [["--part", "0/2"], ["--finish"], ["--part", "0/2", "--finish-last"]]
)
def test_it_does_all_parts_itself(tmp_path: Path, flag: list[str]) -> None:
    line = ("verify", SOURCE, "--parts", tmp_path, "--cluster", "local:2")
    assert answer(*line, *flag)[0].code is ExitCode.USAGE
    assert answer(*line[:-2], "--shares", "3")[0].code is ExitCode.USAGE


@pytest.mark.parametrize("name", ["nowhere", "local:none", "slurm:jobs=none", "slurm:x", "ray:x"])
def test_no_cluster_of_that_name(tmp_path: Path, name: str) -> None:
    line = ("verify", SOURCE, "--parts", tmp_path, "--cluster", name)
    # What is not installed is said first.
    assert answer(*line)[0].code in (ExitCode.USAGE, ExitCode.UNSUPPORTED)


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("distributed", "ray"):
        monkeypatch.setitem(sys.modules, name, None)
    for name, package in (("local:2", "distributed"), ("ray:local", "ray")):
        result, _ = answer("verify", SOURCE, "--parts", tmp_path, "--cluster", name)
        assert result.code is ExitCode.UNSUPPORTED
        assert package in result.message
        assert f"pip install {package}" in result.hint


def test_the_line_of_a_share() -> None:
    line = [
        "verify",
        "--cluster",
        "x",
        "a",
        "--json",
        "--shares=3",
        "--progress",
        "json",
        "--",
        "-b",
    ]
    assert cluster.line_of_share(line) == [
        "verify", "a", "--json", "--quiet", "--jobs", "1", "--", "-b",
    ]  # fmt: skip
    for jobs in (["-j4"], ["--jobs=4"], ["-j", "4"], ["--jobs", "4"]):
        assert cluster.line_of_share(["verify", *jobs, "--cluster=x"]) == [
            "verify", *jobs, "--json", "--quiet",
        ]  # fmt: skip


def test_a_share_has_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["verify", str(SOURCE), "--parts", "p", "--json", "--part"]
    end = do_share(ShareTask(0, 2, [*words, "0/2"], {}, str(tmp_path)))
    assert (end.number, end.code) == (0, 0)
    assert len(end.plan) == 32
    assert list((tmp_path / "p").rglob("0-2.json"))
    monkeypatch.setattr(sys, "executable", "/bin/false")  # as one that was killed
    with pytest.raises(ShareFailedError, match="share 1/2 ended with 1"):
        do_share(ShareTask(1, 2, [*words, "1/2"], {}, "/nowhere"))


def test_a_share_ends_with_its_worker(tmp_path: Path) -> None:
    """Else the same share would be done twice."""
    out = tmp_path / "out"
    words = ["convert", str(SOURCE), str(out), *CONVERT]
    words += ["--limit-rate", "1KB/s", "--json", "--part", "0/2"]
    code = (
        "from ftckpt.operations.many.share_process import ShareTask, do_share;"
        f"do_share(ShareTask(0, 2, {words!r}, {{}}, '/'))"
    )
    worker = subprocess.Popen([sys.executable, "-c", code])
    while not list(tmp_path.rglob("*.running.json")):
        assert worker.poll() is None
        time.sleep(0.05)
    children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    assert len(children) == 1
    worker.kill()
    worker.wait()
    until = time.monotonic() + 60
    while alive(int(children[0])) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(int(children[0]))


# ---- Dask itself


@pytest.fixture(scope="module")
def scheduler() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a scheduler and two workers, each a process."""
    pytest.importorskip("distributed", reason="needs distributed: pip install distributed")
    from distributed import Client

    made: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "distributed.cli." + words[0], *words[1:]]
        quiet = subprocess.DEVNULL
        made.append(subprocess.Popen(line, stdout=quiet, stderr=quiet, start_new_session=True))
        return made[-1]

    port = _free_port()
    address = f"tcp://127.0.0.1:{port}"
    first = start("dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard")
    for _ in range(2):
        start("dask_worker", address, "--nthreads", "1", "--memory-limit", "0", "--no-dashboard")
    with Client(address, timeout=60, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
    yield address, first
    for one in made:
        os.killpg(one.pid, signal.SIGKILL)
        one.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        number: int = one.getsockname()[1]
        return number


def test_dask_with_a_worker_killed(
    tmp_path: Path, scheduler: tuple[str, subprocess.Popen[bytes]]
) -> None:
    from distributed import Client

    address, _ = scheduler
    alone, target = tmp_path / "alone" / "made", tmp_path / "b" / "made"
    words = ["convert", SOURCE, alone, *CONVERT]
    result, _ = answer(*words)
    words[2] = target

    def kill() -> None:
        with Client(address, set_as_default=False) as client:
            pids = client.run(os.getpid)
            while not records(target, "*.write"):
                time.sleep(0.02)
            os.kill(next(iter(pids.values())), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found, document = answer(*words, "--cluster", address, "--shares", "4")
    killer.join()
    assert found == result, found
    assert document["cluster"] == {"name": address, "shares": 4}
    assert files(target) == files(alone)


def test_dask_with_the_scheduler_killed(
    tmp_path: Path, scheduler: tuple[str, subprocess.Popen[bytes]]
) -> None:
    """It is the last test of the scheduler."""
    address, process = scheduler
    alone, target = tmp_path / "alone" / "made", tmp_path / "b" / "made"
    words = ["convert", SOURCE, alone, *CONVERT]
    assert answer(*words)[0].code is ExitCode.OK
    words[2] = target

    def kill() -> None:
        while not records(target, "*.write"):
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    result, _ = answer(*words, "--cluster", address, "--shares", "6")
    killer.join()
    assert result.code is ExitCode.UNAVAILABLE
    assert "--part auto/6" in result.hint
    assert not target.exists()
    for number in range(6):
        assert _part(words, number) is ExitCode.OK
    assert answer(*words, "--finish")[0].code is ExitCode.OK
    assert files(target) == files(alone)


def _part(words: Sequence[Any], number: int) -> ExitCode:
    """Do a part; what a worker is still at is waited for."""
    for _ in range(60):
        result, _ = answer(*words, "--part", f"{number}/6")
        if "being done by another process" not in result.message:
            break
        time.sleep(0.5)
    return ExitCode(result.code)


def test_no_scheduler_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="needs distributed: pip install distributed")
    from ftckpt.operations.many import dask_engine

    monkeypatch.setattr(dask_engine, "_ANSWER", 1)
    line = ("verify", SOURCE, "--parts", tmp_path, "--cluster", f"tcp://127.0.0.1:{_free_port()}")
    result, _ = answer(*line)
    assert result.code is ExitCode.UNAVAILABLE
    assert "no Dask scheduler answers" in result.message
