"""Tell somebody of an alert beside the guard, and dump the stacks of what hangs."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable

from ftckpt.alerting import AlertHook, alert_document, deliver

from .keeper import below, ranks_below

_LAST_S, _DUMP_S = 10.0, 20.0
# A dump of every rank of a large node would be read by nobody.
_DUMPED = 8
_LONGEST = 64 << 10


class Alarm:
    """Tells the user's command and webhook of each alert, beside the guard.

    Args:
        hook: who is told.
        target: the root that is guarded.
        warn: is told if it fails.
    """

    def __init__(self, hook: AlertHook, target: str, warn: Callable[[str], None]) -> None:
        self._hook, self._target, self._warn = hook, target, warn
        self._threads: list[threading.Thread] = []

    def raise_(self, kind: str, message: str) -> None:
        """Tell them; do not wait for it."""
        if any(self._hook):
            thread = threading.Thread(
                target=self._run, args=(kind, message), name="ftckpt-alert", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Wait a moment for what is still told: a machine may be about to go."""
        until = time.monotonic() + _LAST_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, kind: str, message: str) -> None:
        document = alert_document(
            event="raised", verb="guard", target=self._target, time=time.time(), kind=kind,
            message=message,
        )  # fmt: skip
        for problem in deliver(self._hook, document):
            self._warn(f"guard: {problem}")


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
