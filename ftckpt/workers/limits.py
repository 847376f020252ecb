"""Limits of a run: processors, memory, bytes a second."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Iterator

from ftckpt.errors import UsageError

_UNITS = {"": 1, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([kmgtp]?)(i?b?)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the number of bytes that `text` says: `4096`, `512M`, `1GiB`, `1.5GB`.

    `MB` counts in thousands; `MiB` and a bare `M` in 1024s, as other storage tools do.

    Raises:
        UsageError: it is not a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or (match[3].lower() == "i"):
        raise UsageError(f"{text!r} is not a size in bytes", hint="write 512M, 1GiB or 1.5GB")
    number, unit, suffix = float(match[1]), match[2].lower(), match[3].lower()
    if not unit:
        if suffix == "ib":
            raise UsageError(f"{text!r} is not a size in bytes", hint="write 512M, 1GiB or 1.5GB")
        return int(number)
    power = _UNITS[unit]
    scale = 1000 ** (power // 10) if suffix == "b" else 1 << power
    return int(number * scale)


def parse_rate(text: str) -> float:
    """Return bytes a second for `200MiB/s`, `1GiB` or `50M/s`.

    Raises:
        UsageError: it is not a rate, or zero, or lacks a unit: 200 would mean a few bytes a second.
    """
    if re.fullmatch(r"\s*[\d.]+\s*(/s|ps)?\s*", text, flags=re.IGNORECASE):
        raise UsageError(f"{text!r}: a rate needs its unit", hint="write 200MiB/s or 500B/s")
    rate = parse_bytes(re.sub(r"\s*(/s|ps)\s*$", "", text, flags=re.IGNORECASE))
    if rate <= 0:
        raise UsageError(f"{text!r} allows nothing to be read", hint="write a rate: 200MiB/s")
    return float(rate)


def parse_fraction(text: str) -> float:
    """Return a share in (0, 1] for `5%` or `0.05`.

    Raises:
        UsageError: it is none.
    """
    stripped = text.strip()
    percent = stripped.endswith("%")
    try:
        value = float(stripped.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise UsageError(f"{text!r} is not a share between 0 and 100 %", hint="write 5% or 0.05")
    return value


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
