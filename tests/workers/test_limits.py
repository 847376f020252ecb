"""Sizes, rates, and what the machine allows."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from ftckpt import amounts
from ftckpt.errors import UsageError
from ftckpt.workers import limits


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("512M", 512 << 20),
        ("1GiB", 1 << 30),
        ("1.5GB", 1_500_000_000),
        ("2k", 2048),
        ("3 TiB", 3 << 40),
        (" .5g ", 1 << 29),
        ("10kB", 10_000),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert amounts.size(text) == nbytes


@pytest.mark.parametrize("text", ["", "M", "1X", "-1", "1e9", "1MI", "1 i", "3iB", "1.2.3"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError):
        amounts.size(text)


@pytest.mark.parametrize(
    ("text", "rate"), [("200MB/s", 2e8), ("1GiB", 2**30), ("5k/s", 5120), ("200B/s", 200)]
)
def test_rates(text: str, rate: float) -> None:
    assert amounts.rate(text) == rate


@pytest.mark.parametrize("text", ["0", "0B/s", "fast", "/s", "200", "1.5/s", " 200 ps"])
def test_no_rates(text: str) -> None:
    with pytest.raises(UsageError):
        amounts.rate(text)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.25", 0.25), ("100%", 1), ("1", 1)])
def test_fractions(text: str, share: float) -> None:
    assert amounts.share(text) == share


@pytest.mark.parametrize("text", ["0", "101%", "nan", "", "half", "-1"])
def test_no_fractions(text: str) -> None:
    with pytest.raises(UsageError):
        amounts.share(text)


def machine(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


V2 = {"proc/self/cgroup": "0::/job/step\n"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n"}


@pytest.fixture
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.usefixtures("eight_processors")
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        (V2 | {"sys/fs/cgroup/job/step/cpu.max": "max 100000\n"}, 8),
        (V2 | {"sys/fs/cgroup/job/step/cpu.max": "250000 100000\n"}, 3),
        (V2 | {"sys/fs/cgroup/job/cpu.max": "100000 100000\n", "sys/fs/cgroup/job/step/x": ""}, 1),
        (V2 | {"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (
            V1
            | {
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_jobs_follow_the_quota(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert limits.jobs(machine(tmp_path, files)) == expected


MEMINFO = {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable:    4096 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 4096 << 10),
        (
            MEMINFO
            | V2
            | {
                "sys/fs/cgroup/job/step/memory.max": "3000000\n",
                "sys/fs/cgroup/job/step/memory.current": "2500000\n",
                "sys/fs/cgroup/job/step/memory.stat": "anon 5\ninactive_file 40\nactive_file 2\n",
            },
            500042,
        ),
        (
            MEMINFO
            | V1
            | {
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1500\n",
            },
            0,
        ),
        (MEMINFO | V2 | {"sys/fs/cgroup/job/step/memory.max": "max\n"}, 4096 << 10),
    ],
)
def test_memory_follows_the_group(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    assert limits.memory(machine(tmp_path, files)) == expected


def test_this_machine_has_processors() -> None:
    assert 1 <= limits.jobs() <= (os.cpu_count() or 1)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_rate_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    limit = limits.RateLimit(1000)
    for _ in range(11):
        limit.take(500)
    assert clock.now == pytest.approx(105)


def test_idle_time_is_not_saved_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    limit = limits.RateLimit(1000)
    limit.take(1000)
    clock.now += 60
    limit.take(1000)
    limit.take(1000)
    assert clock.now == pytest.approx(161)


def test_a_pickled_rate_limit_keeps_its_rate() -> None:
    assert pickle.loads(pickle.dumps(limits.RateLimit(7.0))).rate == 7.0
