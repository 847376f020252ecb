"""Keep the last lines that a command prints on stderr, for the alert about its end.

A terminal stays the command's own: there a person sees them, and a progress bar needs it. A file
(Slurm's output) is read where the command wrote it; what goes into a pipe passes through here.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from contextlib import suppress

from ftckpt.storage.secrets import masked

_KEPT = 16 << 10
_LINES, _LONGEST = 5, 300
_JOIN_S = 5.0
_FULL = re.compile(r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class LastWords:
    """The end of what one command prints.

    Args:
        stderr: this process's own, to which the command's goes in any case.

    Attributes:
        descriptor: the command's stderr; None for ours.
    """

    def __init__(self, stderr: int = 2) -> None:
        self._stderr, self._tail = stderr, b""
        self._start: int | None = None
        self._thread: threading.Thread | None = None
        self.descriptor: int | None = None
        try:
            kind = os.fstat(stderr)
        except OSError:  # closed
            return
        if stat.S_ISREG(kind.st_mode):
            self._start = kind.st_size
        elif stat.S_ISFIFO(kind.st_mode) or stat.S_ISSOCK(kind.st_mode):
            source, self.descriptor = os.pipe()
            self._thread = threading.Thread(
                target=self._pass_on, args=(source,), name="ftckpt-stderr", daemon=True
            )

    def started(self) -> None:
        """Note that the command has its own copy of the descriptor."""
        if self.descriptor is not None and self._thread is not None:
            os.close(self.descriptor)
            self.descriptor = None
            self._thread.start()

    def text(self) -> str:
        """Return the end of what was printed, once the command has ended; "" if nobody kept it."""
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        elif self._start is not None:
            self._tail = self._written(self._start)
        return _ESCAPES.sub("", self._tail.decode("utf-8", "replace"))

    def _pass_on(self, source: int) -> None:
        with open(source, "rb", buffering=0) as file:
            while data := file.read(_KEPT):
                self._tail = (self._tail + data)[-_KEPT:]
                with suppress(OSError):  # nobody listens any more; the command goes on
                    while data:
                        data = data[os.write(self._stderr, data) :]

    def _written(self, start: int) -> bytes:
        try:
            file = os.open(f"/dev/fd/{self._stderr}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            end = os.fstat(file).st_size
            return os.pread(file, _KEPT, max(start, end - _KEPT))
        except OSError:
            return b""
        finally:
            os.close(file)


def last_lines(text: str) -> str:
    """Return the last lines of a text in one line, for a message that may leave the machine."""
    lines = [line.strip() for line in re.split(r"[\r\n]", text)]
    shown = ["".join(c if c.isprintable() else "?" for c in line) for line in lines if line]
    # Before they are cut: half a URL does not show what was secret in it.
    return " | ".join(masked(line)[:_LONGEST] for line in shown[-_LINES:])


def tells_of_a_full_disk(text: str) -> bool:
    """Say whether the last words are of a disk or a quota that is full."""
    return _FULL.search(text) is not None
