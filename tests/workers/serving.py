"""What a forked process does: it becomes the command. See `forked`.

A module of its own, because each process imports it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence


def serve(words: list[str], environment: dict[str, str], cwd: str, streams: Sequence[str]) -> None:
    """Become the command: called in a process that the server has forked."""
    from ftckpt.__main__ import main

    _become(words, environment, cwd, streams)
    main()


def serve_fds(
    words: list[str], environment: dict[str, str], cwd: str, streams: Sequence[int]
) -> None:
    """Become the command, with the very streams of the one who asked."""
    from ftckpt.__main__ import main

    _enter(words, environment, cwd)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    # The server's own objects remember whether its streams could be sought.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    main()


def serve_program(
    words: list[str], environment: dict[str, str], cwd: str, streams: Sequence[str], program: str
) -> None:
    """Run the text of a program, as `python -c` does."""
    _become(words, environment, cwd, streams)
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def _become(
    words: list[str], environment: dict[str, str], cwd: str, streams: Sequence[str]
) -> None:
    _enter(words, environment, cwd)
    for number, path in enumerate((os.devnull, *streams)):
        flags = os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY
        fd = os.open(path, flags)
        os.dup2(fd, number)
        os.close(fd)


def _enter(words: list[str], environment: dict[str, str], cwd: str) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    sys.argv = ["ftckpt", *words]
