"""Start a command below a keeper, signal it, and wait for its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import IO

from ftckpt.errors import NoResourceError
from ftckpt.replay.processes import end_marked, marked

KEEPER = Path(__file__).with_name("keeper.py")
# The variable that marks every process of a guarded command, with the guard's token.
MARK = "FTCKPT_GUARD"


class Whom(StrEnum):
    """Which processes of a command a signal is for."""

    COMMAND = "command"
    RANKS = "ranks"
    GROUP = "group"


class GuardedCommand:
    """A running command; its whole tree ends with it, and with this process.

    Args:
        words: the command and its arguments.
        environment: all its variables.
        token: marks its processes, so that they can be found if everything else has failed.
        locks: descriptors that are held until its last process has ended.
        stdout: where its output goes; None for ours.
        stderr: the same of what it prints there.

    Raises:
        NoResourceError: the system starts no more processes.
    """

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        token: str,
        *,
        locks: Sequence[int] = (),
        stdout: IO[bytes] | int | None = None,
        stderr: int | None = None,
    ) -> None:
        self._token = token
        self._said = b""
        self.status: int | None = None
        self.pid = 0
        control, self._control = os.pipe()
        self._answers, status = os.pipe()
        line = [sys.executable, "-I", "-S", str(KEEPER), str(control), str(status)]
        try:
            self._process = subprocess.Popen(
                [*line, ",".join(map(str, locks)) or "-1", *words],
                env={**environment, MARK: token},
                pass_fds=[control, status, *locks],
                start_new_session=True,
                stdout=stdout,
                stderr=stderr,
            )
        except OSError as error:
            os.close(self._control)
            os.close(self._answers)
            raise NoResourceError(f"cannot start a process: {error}") from error
        finally:
            os.close(control)
            os.close(status)
        while not self.pid and self.status is None:
            self.read()

    @property
    def keeper(self) -> int:
        """The pid of the process between this one and the command."""
        return self._process.pid

    def fileno(self) -> int:
        """Return what becomes readable when the command has ended."""
        return self._answers

    def read(self) -> int | None:
        """Read what the keeper says; return the command's wait status once it has ended."""
        if self.status is not None:
            return self.status
        said = os.read(self._answers, 4096)
        if not said:
            self._lost()
            return self.status
        *lines, self._said = (self._said + said).split(b"\n")
        for line in lines:
            word, number = line.split()
            if word == b"pid":
                self.pid = int(number)
            else:
                self.status = int(number)
                self._close()
        return self.status

    def send(self, number: int, whom: Whom = Whom.COMMAND) -> None:
        """Send a signal; nothing if the command has ended."""
        with suppress(OSError):
            os.write(self._control, f"signal {int(number)} {whom}\n".encode())

    def end(self) -> None:
        """Kill the command and everything below it, and wait until it is gone."""
        with suppress(OSError):
            os.close(self._control)
        self._control = -1
        if self.status is None:
            self._process.wait()
            self._lost()

    def _lost(self) -> None:
        """The keeper ended without a word: it was killed, or told to end everything."""
        orphans = {self.pid, *marked(MARK, self._token)}
        end_marked(MARK, self._token)
        for pid in orphans:  # ours where this process adopts them
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.status = int(signal.SIGKILL)
        self._close()

    def _close(self) -> None:
        for descriptor in (self._control, self._answers):
            with suppress(OSError):
                os.close(descriptor)
        self._control = self._answers = -1
        self._process.wait()
