"""Shares by Ray: what its driver says, how it may end, and the real Ray where it is installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from ftckpt.errors import ExitCode, MissingPackageError, UnavailableError, UsageError
from ftckpt.operations.many import ray_driver, ray_engine
from ftckpt.operations.many.ray_engine import RayEngine, settings_of
from ftckpt.operations.many.share_process import ShareEnd, ShareFailedError, ShareTask
from tests.servers.process import free_ports

from .answers import answer
from .test_cluster import CONVERT, SOURCE
from .test_copy import files, records

TASKS = [ShareTask(n, 2, ["verify", "x"], {}, "/") for n in range(2)]
SETTINGS = '{"address": "auto"}\n'
SHARES = '[[0, 2, ["verify", "x"], {}, "/"], [1, 2, ["verify", "x"], {}, "/"]]\n'


def test_addresses() -> None:
    assert settings_of("ray://head:10001") == {"address": "ray://head:10001"}
    assert settings_of("ray:auto") == {"address": "auto"}
    assert settings_of("ray:local") == {"address": "local"}
    assert settings_of("ray:local:3") == {"address": "local", "num_cpus": 3}
    for text in ("ray:", "ray:x", "ray://", "ray:local:", "ray:local:0", "ray:local:x"):
        with pytest.raises(UsageError):
            settings_of(text)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray without its client cannot speak with `ray://`, and says so only to who reads on."""
    monkeypatch.setattr(ray_engine, "find_spec", lambda name: None if name == "grpc" else name)
    with pytest.raises(MissingPackageError, match="grpc") as found:
        RayEngine("ray://127.0.0.1:1")
    assert "pip install 'ray[client]'" in found.value.hint


# ---- the driver, with a Ray that does what the test wants


class CrashedError(Exception):
    pass


class TaskError(Exception):
    cause = ShareFailedError("share 1/2 ended with 1 on n1: no such file")


class FakeRay:
    """As much of Ray as the driver uses; `ends` are what the shares come to."""

    exceptions = SimpleNamespace(
        RayTaskError=TaskError, WorkerCrashedError=CrashedError, OutOfMemoryError=CrashedError
    )

    def __init__(self, *ends: object, first: Exception | None = None) -> None:
        self.ends = ends
        self.first = first
        self.left: list[str] = []

    def init(self, **settings: object) -> object:
        if self.first is not None:
            raise self.first
        return SimpleNamespace(dashboard_url="n0:8265")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    def remote(self, function: object) -> Any:
        made = SimpleNamespace(remote=lambda task: task.number)
        return SimpleNamespace(options=lambda **how: made)

    def wait(self, left: list[int], timeout: float) -> tuple[list[int], list[int]]:
        return left[:1], left[1:]

    def get(self, number: int) -> object:
        end = self.ends[number]
        if isinstance(end, Exception):
            raise end
        return end

    def shutdown(self) -> None:
        self.left.append("left")


ENDS = [ShareEnd(n, "n1", "0" * 32, 0, "done", "") for n in range(2)]
CLUSTER = {"slots": 3, "dashboard": "http://n0:8265"}


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (ENDS[1], {"end": list(ENDS[1])}),
        (TaskError("long"), {"error": f"{TaskError.cause}; 4 times"}),
        (CrashedError("signal 9"), {"error": "workers die of a share: signal 9"}),
        (AssertionError(), {"error": "Ray does not go on: AssertionError"}),
    ],
)
def test_what_the_driver_says(
    monkeypatch: pytest.MonkeyPatch, end: object, said: dict[str, object]
) -> None:
    made = FakeRay(ENDS[0], end)
    monkeypatch.setitem(sys.modules, "ray", made)
    heard: list[object] = []
    ray_driver.serve(iter([SETTINGS, SHARES]), heard.append)
    assert heard == [CLUSTER, {"end": list(ENDS[0])}, said]
    assert made.left == ["left"]


def test_the_driver_reaches_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay(first=ConnectionError("timeout")))
    heard: list[object] = []
    ray_driver.serve(iter([SETTINGS, SHARES]), heard.append)
    assert heard == [{"error": "timeout"}]


# ---- the engine, with a driver that does what the test wants


def engine_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *lines: str) -> RayEngine:
    """Return an engine whose driver is a script; `answers` is where it answers."""
    first = ["import os, sys, time", "answers = os.fdopen(int(sys.argv[2]), 'w', buffering=1)"]
    (tmp_path / "driver_of_test.py").write_text("\n".join([*first, "input()", *lines]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ray_engine, "_DRIVER", "driver_of_test")
    monkeypatch.setattr(ray_engine, "find_spec", lambda name: name)
    return RayEngine("ray:auto")


READY = """print('{"slots": 2, "dashboard": ""}', file=answers)"""
END = """print('{"end": [0, "n1", "", 0, "", ""]}', file=answers)"""


def test_ray_ends_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Ray does where the head of the cluster is gone: the line itself must live to say it."""
    cut = "answers.write('{\"end\"'); answers.flush()"
    last = "print('Failed to connect to GCS', file=sys.stderr, flush=True); os.abort()"
    engine = engine_of(monkeypatch, tmp_path, READY, "input()", END, cut, last)
    assert (engine.slots(), engine.dashboard) == (2, "")
    ends = engine.run(TASKS)
    assert next(ends).number == 0
    with pytest.raises(UnavailableError, match="ray:auto is gone: Failed to connect to GCS"):
        next(ends)
    with pytest.raises(UnavailableError, match="is gone"):
        next(engine.run(TASKS))
    engine.close()


def test_no_cluster_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = """print('{"error": "timeout"}', file=answers)"""
    with pytest.raises(UnavailableError, match="no Ray cluster answers at ray:auto: timeout"):
        engine_of(monkeypatch, tmp_path, error)


def test_a_driver_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    engine = engine_of(monkeypatch, tmp_path, deaf, READY, "time.sleep(1000)")
    monkeypatch.setattr(ray_engine, "_LEAVE", 0.05)
    engine.close()
    assert engine._process.returncode == -signal.SIGKILL


# ---- Ray itself


class Head(NamedTuple):
    """A Ray cluster of one node.

    Attributes:
        address: of its client server.
        process: its first one.
        session: folder that the command lines of its processes name.
    """

    address: str
    process: subprocess.Popen[bytes]
    session: Path

    def kill(self) -> None:
        """End all that the head is; what works for it ends by itself."""
        for one in (self.process.pid, *self._servers()):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        self.process.wait()

    def _servers(self) -> list[int]:
        """Return the numbers of its services."""
        names = ("gcs_server", "raylet/raylet", "ray.util.client.server", "dashboard", "monitor")
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                line = path.read_bytes().decode(errors="replace")
                if str(self.session) in line and any(name in line for name in names):
                    found.append(int(path.parent.name))
        return found


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    """Run the head of a cluster, which is its only node; it asks for a token."""
    for name in ("ray", "grpc"):
        if find_spec(name) is None:
            pytest.skip("needs ray: pip install 'ray[client]'")
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef",
            "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }.items():
            patch.setenv(variable, value)
        # A socket's path has at most 107 characters.
        session = Path(f"/tmp/ftckpt-ray-{os.getpid()}")
        port, client = free_ports(2)
        line = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block",
            f"--port={port}", "--node-ip-address=127.0.0.1", f"--ray-client-server-port={client}",
            "--num-cpus=2", "--include-dashboard=false", f"--temp-dir={session}",
        ]  # fmt: skip
        quiet = subprocess.DEVNULL
        made = Head(
            f"ray://127.0.0.1:{client}",
            subprocess.Popen(line, stdin=quiet, stdout=quiet, stderr=quiet),
            session,
        )
        yield made
        made.kill()
        import shutil

        shutil.rmtree(session, ignore_errors=True)


def converted(tmp_path: Path) -> list[Any]:
    """Convert by one process; return the words of the same line to another place."""
    words = ["convert", SOURCE, tmp_path / "alone" / "made", *CONVERT]
    assert answer(*words)[0].code is ExitCode.OK
    words[2] = tmp_path / "b" / "made"
    return words


def test_ray_with_a_worker_killed(tmp_path: Path, head: Head) -> None:
    words = converted(tmp_path)
    target: Path = words[2]

    def kill() -> None:
        while not records(target, "*.running"):
            time.sleep(0.02)
        said = next(target.parent.glob(".ftckpt/parts/*/*.running.json")).read_text()
        share = said.partition('"pid": ')[2].partition("}")[0].partition(",")[0]
        status = Path(f"/proc/{share}/status").read_text()
        worker = int(status.partition("PPid:")[2].split()[0])
        assert b"ray::" in Path(f"/proc/{worker}/cmdline").read_bytes()
        os.kill(worker, signal.SIGKILL)
        killed.append(worker)

    killed: list[int] = []
    killer = threading.Thread(target=kill)
    killer.start()
    line = (*words, "--cluster", head.address, "--shares", "4", "--limit-rate", "20KB/s")
    found, document = answer(*line)
    killer.join()
    assert killed
    assert found.code is ExitCode.OK, found
    assert document["cluster"] == {"name": head.address, "shares": 4}
    assert files(target) == files(tmp_path / "alone" / "made")


def test_ray_with_the_head_killed(tmp_path: Path, head: Head) -> None:
    """It is the last test of the head."""
    words = converted(tmp_path)
    target: Path = words[2]

    def kill() -> None:
        while not records(target, "*.write"):
            time.sleep(0.02)
        head.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    result, _ = answer(*words, "--cluster", head.address, "--shares", "6")
    killer.join()
    assert result.code is ExitCode.UNAVAILABLE, result
    assert "--part auto/6" in result.hint
    assert not target.exists()
    for number in range(6):
        for _ in range(60):
            result, _ = answer(*words, "--part", f"{number}/6")
            if "being done by another process" not in result.message:
                break
            time.sleep(0.5)  # a worker is still at it
        assert result.code is ExitCode.OK, result
    assert answer(*words, "--finish")[0].code is ExitCode.OK
    assert files(target) == files(tmp_path / "alone" / "made")


def test_ray_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray itself says nothing, on a terminal or beside it."""
    pytest.importorskip("ray", reason="needs ray: pip install ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef0123456789abcdef")
    words = converted(tmp_path)
    found, document = answer(*words, "--cluster", "ray:local:2", "--shares", "3")
    assert found.code is ExitCode.OK, found
    assert document["cluster"] == {"name": "ray:local:2", "shares": 3}
    assert files(words[2]) == files(tmp_path / "alone" / "made")
    assert capfd.readouterr() == ("", "")
