"""Start the processes of a small job on this machine, as torchrun would."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

TIMEOUT = 120.0
_servers: list[subprocess.Popen[str]] = []


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
    }
    with tempfile.TemporaryDirectory() as place:
        outputs = [Path(place, str(rank)) for rank in range(ranks)]
        job = [
            {
                "words": [str(program), *map(str, arguments)],
                "environment": {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                "output": str(output),
            }
            for rank, output in enumerate(outputs)
        ]
        codes = _ask(json.dumps(job) + "\n")
        texts = [output.read_text() if output.exists() else "" for output in outputs]
    assert codes == [0] * ranks, texts
    return texts


def _ask(job: str) -> list[int] | str:
    """Let the server run a job; return the exit codes, or what is wrong. It is started once."""
    if not _servers:
        _servers.append(_started())
    server = _servers[0]
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(job)
    server.stdin.flush()
    if not select.select([server.stdout], [], [], TIMEOUT)[0]:
        _end()
        return f"the ranks did not end within {TIMEOUT} s"
    answer = server.stdout.readline()
    if not answer:
        _end()
        return "the server of ranks has died"
    codes: list[int] = json.loads(answer)
    return codes


def _started() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, Path(__file__).with_name("job_server.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its ranks are killed with it
    )


@atexit.register
def _end() -> None:
    for server in _servers:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
    _servers.clear()
