"""Write a large local file in place, piece by piece, in a staging directory."""

from __future__ import annotations

import os

from ftckpt.errors import UnavailableError
from ftckpt.storage.store import Upload

from . import pagecache
from .atomic import make_directories, sync_directory
from .oserror import translate
from .ownership import open_or_make
from .pagecache import in_memory

# Larger writes make larger folios of the page cache, which cost more: 2 GiB took 0.6 to 1 s of
# processor time in writes of 256 KiB and 1.9 to 3.6 s in writes of 1 to 4 MiB (Linux 6.18, ext4).
# They end at multiples of it in the file, because folios are aligned. Not on a tmpfs: threads that
# write one file there wait for each other at every write, and took a sixth longer.
_SLICE = 256 << 10


class LocalUpload(Upload):
    """A file under its own name, of its full size from the beginning; its bytes outlive a kill.

    Attributes:
        shared: whether other machines write other ranges of it: it is never removed here then.

    Raises:
        NoResourceError, DeniedError, UnavailableError: the system refused.
    """

    unit = 1
    shared = False

    def __init__(self, path: str, key: str, size: int) -> None:
        self._path = path
        self._key = key
        self._file: _Descriptor | None = None
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            make_directories(os.path.dirname(path) or ".")
            self._file = _Descriptor(open_or_make(path, flags))
            self._at_once = in_memory(self._file.number)
            os.ftruncate(self._file.number, size)
        except OSError as error:
            self.close()
            raise translate(error, path, "write", key) from error

    def write(self, offset: int, view: memoryview) -> None:
        """Write bytes at `offset`."""
        file = self._file
        if file is None:
            raise UnavailableError(f"writing {self._path} was given up", file=self._key)
        rest = view.cast("B")
        at = offset
        try:
            while rest:
                part = rest if self._at_once else rest[: _SLICE - at % _SLICE]
                done = os.pwrite(file.number, part, at)
                rest, at = rest[done:], at + done
            if not self._at_once:
                pagecache.begin(file.number, offset, at - offset)
        except OSError as error:
            raise translate(error, self._path, "write", self._key) from error

    def finish(self, size: int | None = None) -> None:
        """Flush the file and its name to the disk, and close it.

        A file whose flush failed is removed: the system drops unwritten pages but treats them as
        clean, so a resumed run would read right bytes that the disk does not have.
        """
        file, self._file = self._file, None
        assert file is not None
        try:
            try:
                if size is not None:
                    os.ftruncate(file.number, size)
                os.fsync(file.number)
                file.close()  # reports what a network filesystem could not write back
            except OSError:
                if not self.shared:
                    os.unlink(self._path)
                raise
            sync_directory(os.path.dirname(self._path) or ".")
        except OSError as error:
            raise translate(error, self._path, "write", self._key) from error

    def close(self) -> None:
        """Let go; the bytes stay for a run that resumes."""
        self._file = None


class _Descriptor:
    """An open file's number; closed when its last writer lets go.

    A late worker may still write when its upload is discarded. If the number were closed then, the
    next opened file would get it, and the bytes.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        number, self.number = self.number, -1
        os.close(number)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)
