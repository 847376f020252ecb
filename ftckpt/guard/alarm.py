"""Tell somebody: run the user's command for an alert, and dump the stacks of what hangs."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable

from .keeper import below, ranks_below

_COMMAND_S, _LAST_S, _DUMP_S = 60.0, 10.0, 20.0
# A dump of every rank of a large node would be read by nobody.
_DUMPED = 8
_LONGEST = 64 << 10


class Alarm:
    """Runs a command of the user's for each alert, beside the guard.

    Args:
        command: for the shell, with FTCKPT_ALERT_KIND and FTCKPT_ALERT; "" for none.
        warn: is told if it fails.
    """

    def __init__(self, command: str, warn: Callable[[str], None]) -> None:
        self._command, self._warn = command, warn
        self._threads: list[threading.Thread] = []

    def raise_(self, kind: str, message: str) -> None:
        """Run the command; do not wait for it."""
        if self._command:
            thread = threading.Thread(
                target=self._run, args=(kind, message), name="ftckpt-alert", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Wait a moment for the commands that still run: a machine may be about to go."""
        until = time.monotonic() + _LAST_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, kind: str, message: str) -> None:
        told = os.environ | {"FTCKPT_ALERT_KIND": kind, "FTCKPT_ALERT": message}
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", self._command], env=told, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, timeout=_COMMAND_S, check=False,
            )  # fmt: skip
            if done.returncode:
                self._warn(f"guard: --on-alert ended with {done.returncode}")
        except (OSError, subprocess.TimeoutExpired) as error:
            self._warn(f"guard: --on-alert failed: {error}")


def stacks(keeper: int) -> str:
    """Return the Python stacks of a command's ranks, or of all its processes, by py-spy.

    "" if py-spy is not installed. It may need a privilege to look into another process.
    """
    program = shutil.which("py-spy")
    if program is None:
        return ""
    texts = []
    for pid in (ranks_below(keeper) or below(keeper))[:_DUMPED]:
        try:
            done = subprocess.run(
                [program, "dump", "--pid", str(pid)], stdin=subprocess.DEVNULL,
                capture_output=True, text=True, errors="replace", timeout=_DUMP_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            texts.append(f"py-spy {pid}: {error}")
            continue
        texts.append((done.stdout or done.stderr).strip())
    return "\n".join(texts)[:_LONGEST]
