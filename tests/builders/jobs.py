"""Start the processes of a small job on this machine, as torchrun would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_job(ranks: int, program: Path, *arguments: object) -> list[str]:
    """Run a program on `ranks` processes; return what each printed.

    A rank that fails fails the test, with what all of them said.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, program, *map(str, arguments)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    texts = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, texts
    return texts
