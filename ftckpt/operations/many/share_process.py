"""One share of a command line, by a process of its own, on a machine of a cluster.

A share is the command line with `--part`, whatever the engine is. It has a process of its own,
because it may be killed for memory, makes copies of itself, and handles signals: neither is for a
worker that serves others too.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ftckpt.errors import ExitCode

RETRIES = 3  # how often an engine tries a share again

# What another machine, or this one later, may do better.
_TRY_AGAIN = (ExitCode.INTERNAL, ExitCode.UNAVAILABLE, ExitCode.DENIED, ExitCode.NO_RESOURCE)
_TWIN = "is being done by another process"  # as `StagingLock.take` says it
_TWIN_PAUSE = 2.0  # seconds
_LAST_WORDS = 2000  # characters of stderr


class ShareTask(NamedTuple):
    """One share.

    Attributes:
        number, of: which, of how many.
        words: the command line.
        environment: variables that set flags.
        directory: where it was typed.
    """

    number: int
    of: int
    words: Sequence[str]
    environment: Mapping[str, str]
    directory: str


class ShareEnd(NamedTuple):
    """What became of one.

    Attributes:
        number: which.
        host: where.
        plan: digest of the plan that was found there; "" where none was.
        code: exit code.
        message, hint: of the command.
    """

    number: int
    host: str
    plan: str
    code: int
    message: str
    hint: str


class ShareFailedError(Exception):
    """A share that a machine could not do; another one may."""


def do_share(task: ShareTask) -> ShareEnd:
    """Do one share; called on the machine that does it.

    Raises:
        ShareFailedError: it is to be tried again.
    """
    line = [sys.executable, "-P", "-m", __name__, str(os.getpid()), *task.words]
    others = {k: v for k, v in os.environ.items() if not k.startswith("FTCKPT_")}
    directory = task.directory if os.path.isdir(task.directory) else None
    ended = subprocess.run(
        line, env=others | dict(task.environment), cwd=directory, capture_output=True, text=True,
        errors="replace", check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    host, said = socket.gethostname(), ended.stderr.strip()[-_LAST_WORDS:]
    try:
        found = json.loads(ended.stdout)
        result, part = found["result"], found.get("part")
        code, message, hint = int(result["code"]), str(result["message"]), str(result["hint"])
    except (ValueError, TypeError, KeyError):
        raise ShareFailedError(
            f"share {task.number}/{task.of} ended with {ended.returncode} on {host}: {said}"
        ) from None
    if part is None and (code in _TRY_AGAIN or _TWIN in message):
        time.sleep(_TWIN_PAUSE if _TWIN in message else 0)
        raise ShareFailedError(f"share {task.number}/{task.of} on {host}: {message}")
    return ShareEnd(task.number, host, "" if part is None else part["plan"], code, message, hint)


def main(arguments: Sequence[str]) -> None:
    """Run a command line, and end with the process that has started this one."""
    from ftckpt.workers.processes import die_with

    parent, *words = arguments
    sys.argv = ["ftckpt", *words]
    die_with(int(parent))
    runpy.run_module("ftckpt", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
