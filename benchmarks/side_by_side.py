"""Run contestants in turn on the same data, and print how they compare.

A machine's speed drifts by the minute, so only ratios within one run mean anything: every round
runs every contestant once, and the ratio is taken round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Contestant:
    """One way to do the work; `run` returns how many bytes it handled.

    `prepare` comes before each run and is not timed: it takes away what the last run has made.
    """

    name: str
    run: Callable[[], int]
    ours: bool = False
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Row:
    """What one contestant achieved over all rounds."""

    name: str
    seconds: list[float]
    nbytes: int
    ratios: list[float]  # our speed over its speed, round by round

    @property
    def rate(self) -> float:
        return self.nbytes / statistics.median(self.seconds)


def compare(contestants: list[Contestant], rounds: int) -> list[Row]:
    """Run everyone once to warm up and then `rounds` times in turn."""
    ours = next(c.name for c in contestants if c.ours)
    seconds: dict[str, list[float]] = {c.name: [] for c in contestants}
    nbytes: dict[str, int] = {}
    for number in range(rounds + 1):
        for contestant in contestants:
            contestant.prepare()
            began = time.perf_counter()
            nbytes[contestant.name] = contestant.run()
            if number:
                seconds[contestant.name].append(time.perf_counter() - began)
    return [
        Row(
            name,
            times,
            nbytes[name],
            [theirs / mine for mine, theirs in zip(seconds[ours], times, strict=True)],
        )
        for name, times in seconds.items()
    ]


def show(title: str, rows: list[Row], extra: dict[str, Any], *, as_json: bool) -> None:
    """Print a table, or one JSON document."""
    if as_json:
        document = {
            "benchmark": title,
            "machine": machine(),
            "rows": [
                {
                    "name": row.name,
                    "seconds": row.seconds,
                    "bytes": row.nbytes,
                    "ratio": statistics.median(row.ratios),
                }
                for row in rows
            ],
            **extra,
        }
        print(json.dumps(document, indent=1))
        return
    print(f"{title}  ({machine()})")
    print(f"{'':38}{'median s':>10}{'best s':>10}{'GB/s':>8}{'ours is':>10}")
    for row in rows:
        rate = f"{row.rate / 1e9:8.2f}" if row.nbytes else f"{'':8}"
        ratio = f"{statistics.median(row.ratios):9.2f}x"
        print(
            f"{row.name:38}{statistics.median(row.seconds):10.3f}{min(row.seconds):10.3f}"
            f"{rate}{ratio}"
        )
    for key, value in extra.items():
        print(f"{key}: {value}")


def machine() -> str:
    """Describe this machine in general words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores, {memory:.0f} GiB, {platform.machine()}, Python {platform.python_version()}"
    )


def arguments(description: str, *, size: str = "4GB", rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--size", default=size, help="bytes of test data, such as 4GB")
    parser.add_argument("--rounds", type=int, default=rounds, help="measured rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--dir", help="where to make the data; a temporary directory by default")
    return parser


@contextmanager
def workplace(directory: str | None) -> Iterator[Path]:
    """Yield an empty directory that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="ftckpt-bench-", dir=directory) as path:
        yield Path(path)


def ftckpt_command() -> list[str]:
    """Return how to run the command line of this checkout."""
    return [sys.executable, "-m", "ftckpt"]


def environment() -> dict[str, str]:
    """Return this environment with compiled modules kept, as on a user's machine."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def run_ftckpt(*words: str, codes: tuple[int, ...] = (0,)) -> str:
    """Run the command line as a user does; return its stdout."""
    done = subprocess.run(
        [*ftckpt_command(), *words], capture_output=True, text=True, cwd=ROOT, env=environment()
    )
    if done.returncode not in codes:
        raise SystemExit(f"ftckpt {' '.join(words)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def used_by(*command: str) -> resource.struct_rusage:
    """Run a command as a user does; return what it took of the machine."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, env=environment()
    ) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return used


def peak_memory(*command: str) -> float:
    """Run a command and return the most memory that it held, in MiB."""
    return round(used_by(*command).ru_maxrss / 1024, 1)


def remove(out: Path, source: Path) -> None:
    """Remove what a contestant has made of a source, and leave as much memory at hand.

    The host of a virtual machine takes free memory back, and whoever writes next pays for having it
    again (0.7 s a gigabyte was seen): so as much is written just before each run.
    """
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)
    shutil.copytree(source, out)
    shutil.rmtree(out)


def warm(path: Path) -> None:
    """Read every file below `path` once, so that it is in the page cache."""
    buffer = bytearray(1 << 20)
    for file in sorted(path.rglob("*")):
        if file.is_file():
            with file.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass
