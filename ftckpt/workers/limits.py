"""Limits of a run: processors, memory, bytes a second."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator


def processors() -> int:
    """Return how many processors this process may run on; outside Linux, how many there are."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def jobs(root: str = "/") -> int:
    """Return how many processors this process may use: its affinity and its cgroup's quota.

    Args:
        root: where `/proc` and `/sys` are, for tests.
    """
    quotas = [float(processors())]
    for folder in _groups(root, "cpu"):
        words = _words(f"{folder}/cpu.max")
        if len(words) < 2:
            words = _words(f"{folder}/cpu.cfs_quota_us") + _words(f"{folder}/cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return max(1, math.ceil(min(quotas)))


def memory(root: str = "/") -> int | None:
    """Return how many bytes this process may still take, or None where nothing says so.

    The least of what the system has available and what each enclosing cgroup leaves; page cache
    counts as free, because the kernel gives it up.
    """
    free: list[int] = []
    for line in _lines(f"{root}/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for folder in _groups(root, "memory"):
        for limit_name, usage_name in names:
            limit, usage = _words(f"{folder}/{limit_name}"), _words(f"{folder}/{usage_name}")
            if limit and usage and limit[0].isdigit() and usage[0].isdigit():
                cache = sum(
                    int(line.split()[1])
                    for line in _lines(f"{folder}/memory.stat")
                    if line.startswith(("active_file ", "inactive_file "))
                )
                free.append(max(0, int(limit[0]) - int(usage[0]) + cache))
    return min(free, default=None)


def _groups(root: str, controller: str) -> Iterator[str]:
    """Yield the folders of this process's cgroup and of those around it, versions 1 and 2."""
    for line in _lines(f"{root}/proc/self/cgroup"):
        number, _, rest = line.strip().partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            base = f"{root}/sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = f"{root}/sys/fs/cgroup/{controllers}"
            if not os.path.isdir(base):
                base = f"{root}/sys/fs/cgroup/{controller}"
        else:
            continue
        # In a container the path may be the host's; the folders that are there still count.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            folder = "/".join([base, *parts[:depth]])
            if os.path.isdir(folder):
                yield folder


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readlines()
    except OSError:
        return []


def _words(path: str) -> list[str]:
    return " ".join(_lines(path)).split()


class RateLimit:
    """Limit the bytes a second over all threads that share it.

    A pickled copy keeps the rate and begins anew.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free = 0.0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[RateLimit], tuple[float]]:
        return RateLimit, (self.rate,)

    def take(self, nbytes: int) -> None:
        """Wait until `nbytes` more may be read."""
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now) + nbytes / self.rate
            delay = self._free - nbytes / self.rate - now
        if delay > 0:
            time.sleep(delay)
