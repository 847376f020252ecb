"""Verify, copy and convert from a cold page cache, beside `cat` and `cp` of the same files.

    python benchmarks/cold.py [verify|copy|convert] … [--size 2GB] [--rounds 3] [--json]

What a user meets is the storage: a checkpoint that was written an hour ago is not in memory. Before
each run the pages of the source are dropped with posix_fadvise(POSIX_FADV_DONTNEED), which any user
may do for files that are flushed to the disk, and mincore must then find none of them; a filesystem
that keeps its files in memory (tmpfs) is refused. Below a virtual machine the host may still hold
what the guest has dropped: then "cold" is the speed of the host's cache.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import side_by_side
from dcp_data import save_dcp
from side_by_side import Contestant, compare, ftckpt_command, workplace

from ftckpt import seal
from ftckpt.amounts import size as size_in_bytes
from ftckpt.storage.local.pagecache import in_memory, resident_pages

_STILL = 0.01  # of the pages; read-ahead of a neighbour may bring some back


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0], size="2GB", rounds=3)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    options = parser.parse_args()
    with workplace(options.dir) as place:
        source, out = place / "step-1", place / "out"
        save_dcp(source, size_in_bytes(options.size))
        seal(str(source))
        size = sum(file.stat().st_size for file in source.iterdir())
        for name in options.cases or CASES:
            contestants = [
                Contestant(
                    title,
                    partial(run, size, *command),
                    ours=not number,
                    prepare=partial(make_cold, source, out),
                )
                for number, (title, command) in enumerate(CASES[name](source, out).items())
            ]
            rows = compare(contestants, options.rounds)
            title = f"{name} of DCP from a cold page cache"
            side_by_side.show(title, rows, {"bytes": size}, as_json=options.json)


def run(size: int, *command: str) -> int:
    subprocess.run(
        command, check=True, capture_output=True, cwd=side_by_side.ROOT,
        env=side_by_side.environment(),
    )  # fmt: skip
    return size


def make_cold(source: Path, out: Path) -> None:
    """Remove what the last run has made, and drop the source out of the page cache."""
    side_by_side.remove(out, source)
    pages = still = 0
    for file in source.iterdir():
        fd = os.open(file, os.O_RDONLY)
        try:
            if in_memory(fd):
                raise SystemExit(f"{file} lies in memory alone: name a disk by --dir")
            os.fsync(fd)  # a page that is not yet on the disk would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            held = resident_pages(fd, 0, os.fstat(fd).st_size)
            pages, still = pages + len(held), still + sum(bit & 1 for bit in held)
        finally:
            os.close(fd)
    if still > _STILL * pages:
        raise SystemExit(f"{still} of {pages} pages of the source are still in memory")


def _verify(source: Path, out: Path) -> dict[str, tuple[str, ...]]:
    del out
    return {
        "ftckpt verify, sealed": (*ftckpt_command(), "verify", str(source)),
        "cat > /dev/null": ("sh", "-c", f"cat {source}/* > /dev/null"),
        "sha256sum": ("sh", "-c", f"sha256sum {source}/*"),
    }


def _copy(source: Path, out: Path) -> dict[str, tuple[str, ...]]:
    return {
        "ftckpt copy, hashed, read back, flushed": (
            *ftckpt_command(), "copy", str(source), str(out)
        ),
        "cp -r, then sync": ("sh", "-c", f"cp -r {source} {out}; sync"),
        "cp -r": ("cp", "-r", str(source), str(out)),
    }  # fmt: skip


def _convert(source: Path, out: Path) -> dict[str, tuple[str, ...]]:
    words = ("convert", str(source), str(out), "--to", "safetensors")
    return {
        "ftckpt convert, proven, flushed": (*ftckpt_command(), *words),
        "cp -r, then sync": ("sh", "-c", f"cp -r {source} {out}; sync"),
        "cp -r": ("cp", "-r", str(source), str(out)),
    }


Commands = Callable[[Path, Path], dict[str, tuple[str, ...]]]
CASES: dict[str, Commands] = {"verify": _verify, "copy": _copy, "convert": _convert}


if __name__ == "__main__":
    main()
