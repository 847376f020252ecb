"""Child processes that never outlive the test run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Return ports that were free on loopback a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


# A killed test run cannot stop its servers; the kernel does (prctl 1 is PR_SET_PDEATHSIG).
_UNDERTAKER = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)


@contextmanager
def running(
    commands: Sequence[Sequence[str]],
    log: Path,
    ready: Callable[[], bool],
    *,
    env: Mapping[str, str] | None = None,
    seconds: float = 60,
) -> Iterator[None]:
    """Run `commands` until the block ends; enter it when `ready()` holds.

    Raises:
        RuntimeError: one of them ended, or they were not ready in time; with the log's end.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with log.open("ab") as output:
        try:
            for command in commands:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-S", "-E", "-c", _UNDERTAKER, *command],
                        stdout=output,
                        stderr=output,
                        stdin=subprocess.DEVNULL,
                        env={**os.environ, **(env or {})},
                    )
                )
            deadline = time.monotonic() + seconds
            while not ready():
                ended = [p.args for p in processes if p.poll() is not None]
                if ended or time.monotonic() > deadline:
                    tail = log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"not ready; ended: {ended}; log: {tail}")
                time.sleep(0.05)
            yield
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def listens(port: int) -> bool:
    """Say whether something accepts connections on a loopback port."""
    try:
        socket.create_connection(("127.0.0.1", port), 0.5).close()
    except OSError:
        return False
    return True
