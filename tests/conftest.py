"""Fixtures that every test may use: a clean environment, and places on each kind of store."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from ftckpt.storage.store import Entry
from tests import campaign
from tests.builders import archives
from tests.servers.moto import moto_server
from tests.servers.rclone import rclone_server
from tests.servers.rgw import radosgw_server
from tests.servers.s3 import BUCKET, S3Service
from tests.servers.swift import swift_server
from tests.workers import parsers

_numbers = itertools.count()

# How long an example takes says how busy the machine is. What is short is the same for everybody:
# a failure is seen again, and none comes by chance. `--campaign full` draws others each time.
settings.register_profile("short", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("full", deadline=None)
settings.load_profile("short")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--campaign",
        choices=("short", "full"),
        default="short",
        help="how much of what can be damaged is damaged: a sample, or every byte",
    )

    parser.addoption(
        "--variants",
        choices=("some", "all"),
        default="some",
        help="of tests with many variants in `MANY_VARIANTS`: every third one, or all",
    )


def no_power_cut(fd: Any) -> None:
    """Stand for `os.fsync`: only a power cut would show it, and the disk takes minutes for it.

    That it is called, and when, is held by tests that put their own in its place.
    """
    os.fstat(fd if isinstance(fd, int) else fd.fileno())


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected, of which nothing is garbage
    if not hasattr(config, "workerinput"):  # workers inherit the environment, and so the folder
        folder = tempfile.TemporaryDirectory(prefix="ftckpt-archives-")
        os.environ[archives.PLACE] = folder.name
        config.add_cleanup(folder.cleanup)
    parsers.load_once()
    full = config.getoption("campaign") == "full"
    campaign.begin(full=full)
    settings.load_profile("full" if full else "short")
    if not full:
        os.fsync = no_power_cut
        # Else it draws what the modules that happen to be imported have as constants: each worker
        # parses all of ftckpt for it, and the examples are not the same for everybody.
        providers._get_local_constants = lambda: providers._local_constants
    # Where nothing is to be kept, each interpreter that a test starts would compile everything.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # A job in the background of a script ignores these, and so would each command that a test
    # starts: one that is to end by Ctrl-C would not.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(
                number,
                signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL,
            )


# What runs in seconds and starts no server: the lane for while one works, under 90 seconds on two
# cores. The rest starts processes, services and campaigns.
FAST = (
    "checkpoint", "comparison", "digests", "discovery", "formats/huggingface",
    "formats/safetensors", "formats/torchsave", "inspection", "manifest", "planning", "health",
    "storage", "transfer/read", "transfer/request", "test_house.py", "test_words.py",
)  # fmt: skip


# Most of the suite's time. Their variants are formats, sizes and samples that share most of their
# code; `--variants all`, before a release and after a change of theirs, runs each.
MANY_VARIANTS = (
    "formats/megatron", "formats/deepspeed", "formats/dcp", "formats/ranks", "formats/trainer_dirs",
    "formats/orbax", "formats/delta", "formats/lora", "formats/families", "formats/quantised",
    "replay", "retention", "transfer", "verification", "faults", "delta", "replication", "parts",
    "guard", "storage", "test_training_states.py", "commands", "formats/pickles", "planning",
    "joblogs",
)  # fmt: skip
_FEW = 4


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what is there for good: it is gone over at each turn.

    Ten thousand tests and all that they import are some two million objects.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


# Minutes where the machine is busy: it begins first, so that nothing waits for it at the end.
LONGEST = "test_checks.py"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is in the fast lane, and take every third variant of tests with many."""
    items.sort(key=lambda item: item.path.name != LONGEST)
    if config.getoption("variants") == "some" and config.getoption("campaign") == "short":
        _thin(config, items)
    for item in items:
        slow = any(item.get_closest_marker(one) for one in ("s3", "slow", "peer", "gpu"))
        if not slow and _is_in(item.path, FAST):
            item.add_marker("fast")


@cache
def _is_in(path: Path, places: tuple[str, ...]) -> bool:
    """Tell whether a file lies in `places`; thousands of tests ask, of a few hundred files."""
    here = Path(__file__).parent
    return any(path.is_relative_to(here / one) for one in places)


def _thin(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take every third variant of the tests in `MANY_VARIANTS` that have more than a few.

    A test that is named on the command line is run whole.
    """
    if any("::" in word for word in config.args):
        return
    variants: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "[" in item.nodeid and _is_in(item.path, MANY_VARIANTS):
            variants[item.nodeid.partition("[")[0]].append(item)
    kept = {id(one) for many in variants.values() for one in many[:: 3 if len(many) > _FEW else 1]}
    gone = {id(one) for many in variants.values() for one in many} - kept
    config.hook.pytest_deselected(items=[one for one in items if id(one) in gone])
    items[:] = [one for one in items if id(one) not in gone]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the machine's user has set, so that a test sees only its own settings."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "FTCKPT_", "FSSPEC_")) or name in (
            "NO_COLOR",
            "FORCE_COLOR",
            "COLUMNS",
            "LINES",
            "TERM",
        ):
            monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    # Each client loads what it trusts, also where it will speak plain HTTP: all that the machine
    # trusts take 30 ms.
    monkeypatch.setenv("AWS_CA_BUNDLE", str(Path(__file__).parent / "data" / "one-authority.pem"))
    # Without it a client without credentials asks the cloud's metadata address, outside loopback.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(autouse=True)
def files_as_old_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be as old as a test made them: nobody can set when an inode changed."""
    monkeypatch.setattr(Entry, "touched", property(attrgetter("mtime")))


@pytest.fixture(scope="session")
def swift() -> Iterator[S3Service]:
    """A real S3 service, started once."""
    with swift_server() as service:
        service.client.create_bucket(Bucket=BUCKET)
        yield service
        service.client.close()


@pytest.fixture(scope="session")
def radosgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Service]:
    """A real S3 service whose conditions hold under a race; skips where it is not installed."""
    with radosgw_server(tmp_path_factory.mktemp("rgw")) as service:
        if service is None:
            pytest.skip("radosgw, ceph-mon and ceph-osd are not installed")
        service.client.create_bucket(Bucket=BUCKET)
        yield service
        service.client.close()


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Service]:
    """A lookalike of S3 that ignores conditions."""
    with rclone_server(tmp_path_factory.mktemp("rclone")) as service:
        service.client.create_bucket(Bucket=BUCKET)
        yield service
        service.client.close()


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Service]:
    """A mock of S3, for what no server here can be made to show."""
    with moto_server() as service:
        service.client.create_bucket(Bucket=BUCKET)
        yield service
        service.client.close()


@pytest.fixture(scope="session")
def command_folder() -> Iterator[Path]:
    """A folder for the PATH of a script: it holds `ftckpt`, which does not start from nothing."""
    from tests.workers.command import on_a_path

    with on_a_path() as folder:
        yield folder


@pytest.fixture
def local_url(tmp_path: Path) -> str:
    """An empty directory."""
    place = tmp_path / "place"
    place.mkdir()
    return str(place)


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    """A folder of a filesystem that is memory; where there is none, the test is skipped."""
    with open("/proc/mounts", encoding="utf-8") as mounts:
        kinds = dict(line.split()[1:3] for line in mounts)
    if kinds.get("/dev/shm") != "tmpfs" or not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no tmpfs")
    with tempfile.TemporaryDirectory(prefix="ftckpt-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def s3_url(swift: S3Service, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of its own on a real S3 service, with the environment that leads there.

    The environment is set for this process and so for the processes that the test starts.
    """
    swift.enter(monkeypatch)
    return f"s3://{BUCKET}/place-{next(_numbers)}"
