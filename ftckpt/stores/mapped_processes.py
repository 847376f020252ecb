"""The processes that hash mapped files for `mapped`: how they are started, asked and ended.

What they do is in `mapped_worker`; whatever becomes of one, who asks it hears of an error.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from . import mapped_worker

# What the interpreter itself may need of the environment.
_NEEDED = ("LD_LIBRARY_PATH",)
# How long an answer may take, in seconds, before the ranges in memory are read instead.
PATIENCE = 10.0


class Line:
    """The line to one process; one thread at a time asks."""

    def __init__(self, ours: socket.socket) -> None:
        ours.settimeout(PATIENCE)
        self._socket = ours

    def fileno(self) -> int:
        """Return the descriptor of this end."""
        return self._socket.fileno()

    def is_served(self) -> bool:
        """Say whether the process is there, once there is something to take, or the end of it."""
        try:
            return self._socket.recv(len(mapped_worker.READY) + 1) == mapped_worker.READY
        except OSError:
            return False

    def ask(self, requests: Sequence[bytes]) -> list[bytes | None]:
        """Return the digest that answers each request of `mapped_worker`, or None.

        Raises:
            OSError: it has died, does not answer, or answers something else.
        """
        # One that has died since is no reason for a SIGPIPE, which a host may not ignore.
        self._socket.send(b"".join(requests), socket.MSG_NOSIGNAL)
        width, head = mapped_worker.ANSWER, mapped_worker.REQUEST
        message = self._socket.recv(len(requests) * width + 1)
        answers = [message[start : start + width] for start in range(0, len(message), width)]
        if len(message) % width or [answer[:head] for answer in answers] != list(requests):
            raise BrokenPipeError
        return [answer[head + 1 :] if answer[head] else None for answer in answers]

    def close(self) -> None:
        """Let go of it, which ends the process; nobody may be asking."""
        self._socket.close()


class Processes:
    """Processes that are started as one, which makes the others: starting Python takes longest."""

    def __init__(self, count: int) -> None:
        """Start them; each says on its line when it is there.

        Args:
            count: how many.

        Raises:
            OSError: they cannot be started.
        """
        import xxhash

        where = str(Path(xxhash.__file__).parent.parent)
        script = str(mapped_worker.__file__)
        with ExitStack() as theirs, ExitStack() as ours:
            # Their standard output is no line: what is loaded into every process may write there.
            # Messages of a line are kept apart, so that one call sends or takes all of one.
            pairs = []
            for _ in range(count):
                one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                pairs.append((ours.enter_context(one), theirs.enter_context(other)))
            numbers = [other.fileno() for _, other in pairs]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", script, where, str(os.getpid()), *map(str, numbers)],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Who collects crashes keeps the environment, and there are secrets in ours.
                env={name: os.environ[name] for name in _NEEDED if name in os.environ},
                # Ctrl-C is for us; and a thread that asks just then is not to be told nonsense.
                # All of them are one group, which is ended as one.
                start_new_session=True,
            )
            ours.pop_all()
        self.lines = [Line(one) for one, _ in pairs]

    def end(self) -> None:
        """Kill them; a thread that waits for an answer hears that its process has died."""
        # The first one has not been waited for, so that the number is still that of the group.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # What hangs in the kernel does not even die; it is not waited for.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
