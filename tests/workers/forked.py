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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import ftckpt
from tests.workers.serving import serve, serve_program

TIMEOUT = 400.0
# What the interpreter itself reads as it starts.
_OF_THE_START = ("PYTHON", "LANG", "LC_", "LD_")
_OF_TRAINERS = ("ftckpt.torch", "ftckpt.trainers", "ftckpt.loading.tensors")


def _modules() -> Iterator[str]:
    """Yield the names of all that a verb may import before it knows what it needs.

    What trainers load with needs torch, which no verb does: three times the memory to fork.
    """
    yield from _below(ftckpt.__path__, "ftckpt.")
    yield "tests.workers.serving"
    yield from ("numpy", "xxhash", "zstandard", "s3fs", "matplotlib.figure", "tests.workers.warm")


def _below(folders: Iterable[str], prefix: str) -> Iterator[str]:
    for module in pkgutil.iter_modules(folders, prefix):
        if module.name in _OF_TRAINERS or module.name == "ftckpt.__main__":
            continue
        yield module.name
        if module.ispkg:
            name = module.name.rpartition(".")[2]
            yield from _below([f"{folder}/{name}" for folder in folders], f"{module.name}.")


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(list(_modules()))


def needs_a_start(environment: Mapping[str, str], without: Sequence[str] = ()) -> bool:
    """Tell whether an environment differs in what the interpreter reads as it starts."""
    other = {name for name, _ in os.environ.items() ^ environment.items()}.difference(without)
    return any(name.startswith(_OF_THE_START) for name in other)


def run(
    words: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path | None = None,
    *,
    program: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run `ftckpt WORDS` without input or terminal; return what it printed and how it ended.

    Args:
        words: verb and arguments.
        environment: all of it.
        cwd: where; None for this process's directory.
        program: the text that runs instead, with these words.

    Raises:
        subprocess.TimeoutExpired: it does not end; it was killed.
    """
    line = [sys.executable, *(("-c", program) if program else ("-m", "ftckpt")), *words]
    if needs_a_start(environment):
        return start(line, environment, cwd)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        streams = [f"/proc/{os.getpid()}/fd/{stream.fileno()}" for stream in (out, err)]
        given = (list(words), dict(environment), str(cwd or Path.cwd()), streams)
        if program:
            process = FORKS.Process(target=serve_program, args=(*given, program))
        else:
            process = FORKS.Process(target=serve, args=given)
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
