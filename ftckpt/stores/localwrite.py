"""Write a large local file in place, piece by piece, in a staging directory."""

from __future__ import annotations

import os

from ftckpt.store import Upload

from . import writeback
from .atomic import make_directories, sync_directory
from .oserror import translate


class LocalUpload(Upload):
    """A file under its own name, of its full size from the beginning; its bytes outlive a kill.

    Args:
        path: on this machine.
        key: its key in the store.
        size: bytes that it will have.

    Raises:
        NoResourceError, DeniedError, UnavailableError: the system refused.
    """

    unit = 1
    resumes = True

    def __init__(self, path: str, key: str, size: int) -> None:
        self._path = path
        self._key = key
        self._fd = -1
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            make_directories(os.path.dirname(path) or ".")
            self._fd = os.open(path, flags, 0o666)
            os.ftruncate(self._fd, size)
        except OSError as error:
            self.close()
            raise translate(error, path, "write", key) from error

    def __del__(self) -> None:
        self.close()

    def write(self, offset: int, view: memoryview) -> None:
        """Write bytes at `offset`."""
        rest = view.cast("B")
        at = offset
        try:
            while rest:
                done = os.pwrite(self._fd, rest, at)
                rest, at = rest[done:], at + done
            writeback.begin(self._fd, offset, at - offset)
        except OSError as error:
            raise translate(error, self._path, "write", self._key) from error

    def finish(self) -> None:
        """Flush the file and its name to the disk, and close it."""
        try:
            os.fsync(self._fd)
            sync_directory(os.path.dirname(self._path) or ".")
            fd, self._fd = self._fd, -1
            os.close(fd)  # reports what a network filesystem could not write back
        except OSError as error:
            raise translate(error, self._path, "write", self._key) from error

    def close(self) -> None:
        """Let go; the bytes stay for a run that resumes."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
