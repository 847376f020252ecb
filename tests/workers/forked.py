"""The command line in a process of its own, without an interpreter's start for each.

A server imports what the verbs import, and forks for every command: streams, environment, exit code
and signals are those of a process, and what importing takes is spent once. What is about the start
itself (locales, limits, what is imported) needs `python -m ftckpt`.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import ftckpt

TIMEOUT = 120.0
# What the interpreter itself reads as it starts.
_OF_THE_START = ("PYTHON", "LANG", "LC_", "LD_")


def _modules() -> Iterator[str]:
    """Yield the names of all that a verb may import before it knows what it needs."""
    for module in pkgutil.walk_packages(ftckpt.__path__, "ftckpt."):
        if not module.name.endswith("__main__"):
            yield module.name
    yield from ("numpy", "xxhash", "zstandard", "s3fs", "aiobotocore.session", "matplotlib.figure")


_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(list(_modules()))


def run(
    words: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `ftckpt WORDS` without input or terminal; return what it printed and how it ended.

    Args:
        words: verb and arguments.
        environment: all of it.
        cwd: where; None for this process's directory.

    Raises:
        subprocess.TimeoutExpired: it does not end; it was killed.
    """
    line = [sys.executable, "-m", "ftckpt", *words]
    other = {name for name, _ in os.environ.items() ^ environment.items()}
    if any(name.startswith(_OF_THE_START) for name in other):
        return start(line, environment, cwd)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        streams = [f"/proc/{os.getpid()}/fd/{stream.fileno()}" for stream in (out, err)]
        given = (list(words), dict(environment), str(cwd or Path.cwd()), streams)
        process = _forks.Process(target=_serve, args=given)
        process.start()
        process.join(TIMEOUT)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(line, TIMEOUT)
        code = process.exitcode
        process.close()
        printed = [_read(stream) for stream in (out, err)]
    return subprocess.CompletedProcess(line, code, *printed)


def start(
    line: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run any command line as `run` does, from its interpreter's start."""
    return subprocess.run(
        line,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        stdin=subprocess.DEVNULL,
        env=environment,
        cwd=cwd,
        timeout=TIMEOUT,
        check=False,
    )


def _read(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="backslashreplace")


def _serve(words: list[str], environment: dict[str, str], cwd: str, streams: Sequence[str]) -> None:
    """Become the command: called in a process that the server has forked."""
    from ftckpt.__main__ import main

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    for number, path in enumerate((os.devnull, *streams)):
        flags = os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY
        fd = os.open(path, flags)
        os.dup2(fd, number)
        os.close(fd)
    sys.argv = ["ftckpt", *words]
    main()
