"""Verify of a sealed checkpoint against xxhsum and against plain reads of the same bytes.

    python benchmarks/verify.py [--size 4GB] [--rounds 5] [--json]

Everyone reads the same files from a warm page cache with as many threads or processes. The command
is also run as a user runs it, with the interpreter's start; on a fast machine that is a good part
of the time for a few gigabytes, and none for a real checkpoint.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from pathlib import Path

import side_by_side
from dcp_data import save_dcp
from side_by_side import Contestant, compare, ftckpt_command, run_ftckpt, warm, workplace

from ftckpt.amounts import size as size_in_bytes
from ftckpt.discovery.resolve import open_target
from ftckpt.formats.catalog import FORMATS
from ftckpt.manifest.locate import find
from ftckpt.manifest.seal import seal
from ftckpt.storage import StoreOptions
from ftckpt.verification.blocks import check_manifest
from ftckpt.workers import Work
from ftckpt.workers.limits import jobs


def main() -> None:
    parser = side_by_side.arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    threads = jobs()
    with workplace(options.dir) as place:
        path = place / "step-1"
        save_dcp(path, size_in_bytes(options.size))
        seal(open_target(str(path), FORMATS, StoreOptions()).open(), work=Work(threads=threads))
        files = sorted(path.glob("*.distcp"))
        shares = shared(files, threads)
        warm(path)
        contestants = [
            Contestant("ftckpt, the check in a process", lambda: verify(path, threads), ours=True),
            Contestant("ftckpt verify, the command", lambda: command(path, threads, files)),
            Contestant(f"plain reads, {threads} threads", lambda: read_all(shares)),
        ]
        if shutil.which("xxhsum"):
            contestants.append(
                Contestant(f"xxhsum -H2, {threads} processes", lambda: xxhsum(shares))
            )
        rows = compare(contestants, options.rounds)
        extra: dict[str, object] = {
            "peak RssAnon of the command, MiB": peak_anonymous(path, threads)
        }
        if not shutil.which("xxhsum"):
            extra["left out"] = "xxhsum is not installed (Debian package xxhash)"
        side_by_side.show("verify, sealed, warm", rows, extra, as_json=options.json)


def shared(files: list[Path], count: int) -> list[list[Path]]:
    """Deal the files out by size, so that every worker has as much to read."""
    shares: list[list[Path]] = [[] for _ in range(count)]
    for file in sorted(files, key=lambda f: -f.stat().st_size):
        min(shares, key=lambda s: sum(f.stat().st_size for f in s)).append(file)
    return shares


def total(files: list[Path]) -> int:
    return sum(f.stat().st_size for f in files)


def verify(path: Path, threads: int) -> int:
    checkpoint = open_target(str(path), FORMATS, StoreOptions()).open()
    manifest = find(checkpoint.source)
    assert manifest is not None
    result = check_manifest(checkpoint.source, manifest, emit=print, work=Work(threads=threads))
    assert result.ok
    return result.bytes_read


def command(path: Path, threads: int, files: list[Path]) -> int:
    run_ftckpt("verify", str(path), "--jobs", str(threads))
    return total(files)


def read_all(shares: list[list[Path]]) -> int:
    def read(files: list[Path]) -> None:
        buffer = bytearray(1 << 20)
        for file in files:
            fd = os.open(file, os.O_RDONLY)
            while os.readv(fd, [buffer]):
                pass
            os.close(fd)

    threads = [threading.Thread(target=read, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(map(total, shares))


def xxhsum(shares: list[list[Path]]) -> int:
    running = [
        subprocess.Popen(["xxhsum", "-H2", *map(str, share)], stdout=subprocess.DEVNULL)
        for share in shares
        if share
    ]
    for process in running:
        assert process.wait() == 0
    return sum(map(total, shares))


def peak_anonymous(path: Path, threads: int) -> float:
    """Return the most private memory that one run of the command held, by looking at it often."""
    peak = 0
    with subprocess.Popen(
        [*ftckpt_command(), "verify", str(path), "--jobs", str(threads)],
        stdout=subprocess.DEVNULL,
        cwd=side_by_side.ROOT,
        env=side_by_side.environment(),
    ) as process:
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                break
            for line in status.splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]))
    return round(peak / 1024, 1)


if __name__ == "__main__":
    main()
