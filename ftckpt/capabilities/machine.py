"""What this machine can do: packages, processor, limits, GPUs.

One line of what a machine and a place can do.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from ftckpt import plugins
from ftckpt.amounts import human_bytes
from ftckpt.digests.crc import checksum
from ftckpt.errors import UnsupportedError
from ftckpt.findings import counted
from ftckpt.packages import REQUIREMENTS
from ftckpt.version import __version__
from ftckpt.workers.limits import jobs, memory, processors


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    NOTE = "note"  # something that a user may want to know or to install
    UNKNOWN = "unknown"  # the system or the service does not say
    PROBLEM = "problem"  # a verb fails here, or a checkpoint may be lost


class Check(NamedTuple):
    """What was looked at.

    Attributes:
        area: `ftckpt`, `packages`, `processor`, `limits` or `place`.
        name: what was looked at.
        state: how it ended.
        found: the value, in a few words.
        means: what follows for ftckpt's verbs, as a sentence without a full stop.
        do: what the user can do; "" where nothing is to be done.
    """

    area: str
    name: str
    state: State
    found: str
    means: str
    do: str = ""


_SAMPLE = 32 << 20
_FEW_FILES = 1024
# What the CRC-32 of isal and XXH3 use: carry-less products and vectors, on x86-64 and arm64.
_INSTRUCTIONS = ("pclmulqdq", "vpclmulqdq", "avx2", "avx512f", "pmull", "crc32", "asimd", "sve")


class _Use(NamedTuple):
    """What a package is for; without a needed one verbs fail."""

    means: str
    needed: bool = False


_USES = {
    "numpy": _Use("compares, casts and sums up elements", needed=True),
    "xxhash": _Use("digests of manifests, seals and copies", needed=True),
    "zstandard": _Use("compressed items, deltas", needed=True),
    "rich": _Use("the progress bar on a terminal; lines do without"),
    "fsspec": _Use("all object stores: s3://, gs://, az://"),
    "s3fs": _Use("s3://"),
    "torch": _Use("--device cuda, the demo, casts of 8-bit floats; no other verb needs it"),
    "isal": _Use("CRC-32s of verify, four times as fast as zlib's"),
    "lz4": _Use("checkpoints that were compressed as whole files with lz4"),
    "matplotlib": _Use("--plot FILE; --plot - does without"),
    "gcsfs": _Use("gs://"),
    "adlfs": _Use("az://, abfs://"),
}


def examine_machine() -> Iterator[Check]:
    """Yield what this machine offers; it takes a second, torch's import included."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield Check("ftckpt", "version", State.OK, __version__, "the version to name in a report")
    python = f"{platform.python_implementation()} {platform.python_version()}"
    yield Check("ftckpt", "python", State.OK, python, f"runs from {sys.prefix}")
    if sys.platform == "linux":
        yield Check("ftckpt", "system", State.OK, system, "every capability is here")
    else:
        yield Check(
            "ftckpt", "system", State.NOTE, system,
            "reads pass through the page cache, repair swaps nothing in place, and replay run "
            "does not confine what it starts: these are Linux's own",
        )  # fmt: skip
    yield from _packages()
    yield from _added()
    yield _instructions()
    yield from _speed()
    yield from _limits()
    yield _gpus()


def _added() -> Iterator[Check]:
    for group, what in ((plugins.VERBS, "verb"), (plugins.FORMATS, "format")):
        for name, one in plugins.plugins(group).items():
            try:
                plugins.load(group, name)
                yield Check("packages", name, State.OK, one.package, f"adds the {what} {name!r}")
            except UnsupportedError as error:
                yield Check("packages", name, State.NOTE, one.package, error.message, error.hint)


def _packages() -> Iterator[Check]:
    for name, use in _USES.items():
        try:
            yield Check("packages", name, State.OK, version(name), use.means)
        except PackageNotFoundError:
            state = State.PROBLEM if use.needed else State.NOTE
            do = f"pip install {REQUIREMENTS[name]}"
            yield Check("packages", name, state, "absent", use.means, do)


def _instructions() -> Check:
    """Return which instructions the sums can use, as the kernel names them."""
    means = "isal and xxhash choose the best of these themselves"
    flags: set[str] = set()
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, words = line.partition(":")
            if name.strip() in ("flags", "Features"):  # x86-64 and arm64
                flags = set(words.split())
                break
    if not flags:
        return Check("processor", "instructions", State.UNKNOWN, "not told", means)
    found = [one for one in _INSTRUCTIONS if one in flags]
    if found:
        return Check("processor", "instructions", State.OK, ", ".join(found), means)
    means = "CRC-32s and XXH3 are slow without carry-less products and vectors"
    return Check("processor", "instructions", State.NOTE, "none of those used", means)


def _speed() -> Iterator[Check]:
    data = bytes(_SAMPLE)
    crc = checksum()
    ours = (crc.__module__ or "zlib").partition(".")[0]
    yield _measured("CRC-32", ours, lambda: crc(data, 0), "verify of records that torch wrote")
    try:
        import xxhash
    except ModuleNotFoundError:
        return
    yield _measured(
        "XXH3-128", "xxhash", lambda: xxhash.xxh3_128_digest(data), "seal, copy and manifests"
    )


def _measured(name: str, by: str, work: Callable[[], object], means: str) -> Check:
    work()  # the first run also finds the memory
    began = time.perf_counter()
    work()
    rate = _SAMPLE / max(time.perf_counter() - began, 1e-9)
    found = f"{by}, {human_bytes(int(rate))}/s a core"
    slow = by == "zlib"
    do = "pip install isal" if slow else ""
    return Check("processor", name, State.NOTE if slow else State.OK, found, means, do)


def _limits() -> Iterator[Check]:
    able, allowed, present = processors(), jobs(), os.cpu_count() or 1
    found = counted(allowed, "processor")
    if allowed < present:
        why = "the cgroup's quota" if allowed < able else "the affinity"
        found += f" of {present}, by {why}"
    yield Check("limits", "processors", State.OK, found, "what --jobs takes by default follows it")
    free = memory()
    if free is None:
        yield Check(
            "limits", "memory", State.UNKNOWN, "not told", "--max-memory holds at its default"
        )
    else:
        short = free < 2 << 30
        yield Check(
            "limits", "memory", State.NOTE if short else State.OK, f"{human_bytes(free)} left",
            "the system and its cgroups leave so much to this process",
            "lower --max-memory and --jobs" if short else "",
        )  # fmt: skip
    try:
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError, ValueError):
        return
    few = 0 <= files < _FEW_FILES
    yield Check(
        "limits", "open files", State.NOTE if few else State.OK,
        "unlimited" if files < 0 else str(files), "each file that is read at once takes one",
        "ulimit -n 4096" if few else "",
    )  # fmt: skip


def _gpus() -> Check:
    means = "reshard and convert take --device cuda; every other verb works on the processor"
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [torch.cuda.get_device_properties(i) for i in range(count)]
    except ModuleNotFoundError:
        return Check("processor", "GPUs", State.NOTE, "torch is absent", means, "pip install torch")
    except (ImportError, OSError, RuntimeError) as error:
        return Check("processor", "GPUs", State.UNKNOWN, f"torch does not load: {error}", means)
    if not count:
        return Check("processor", "GPUs", State.OK, "none", means)
    found = ", ".join(f"{one.name} ({human_bytes(one.total_memory)})" for one in names)
    return Check("processor", "GPUs", State.OK, found, means)
