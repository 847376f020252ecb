"""Large objects on any fsspec filesystem: written in order, visible when closed."""

from __future__ import annotations

import threading
from typing import Any

from ftckpt.errors import FtckptError, UnavailableError
from ftckpt.extents import BLOCK
from ftckpt.storage.store import Store, Upload

from .errors import translate


class FsspecUpload(Upload):
    """One object, written from its beginning to its end: a part waits for those before it.

    `file` is fsspec's own file, opened for writing.
    """

    unit = BLOCK

    def __init__(self, store: Store, path: str, size: int, file: Any) -> None:
        self._store = store
        self._path = path
        self._size = size
        self._at = 0
        self._turn = threading.Condition()
        self._closed = False
        self._file = file

    def write(self, offset: int, view: memoryview) -> None:
        """Write one part when its turn comes; parts must begin in order."""
        with self._turn:
            self._turn.wait_for(lambda: self._at >= offset or self._closed)
            if self._closed:
                raise UnavailableError(f"writing {self._path} was given up", file=self._path)
            try:
                self._file.write(view)
            except Exception as error:
                raise self._failed(error) from error
            self._at = offset + len(view)
            self._turn.notify_all()

    def finish(self, size: int | None = None) -> None:
        """Close the object and compare its size."""
        self._size = self._size if size is None else size
        try:
            self._file.close()
        except Exception as error:
            raise self._failed(error) from error
        self._closed = True
        if self._store.stat(self._path).size != self._size:
            raise UnavailableError(
                f"{self._store.describe(self._path)} does not hold what was written to it",
                file=self._path,
            )

    def close(self) -> None:
        """Discard an unfinished object."""
        from fsspec.spec import AbstractBufferedFile

        with self._turn:
            if not self._closed and isinstance(self._file, AbstractBufferedFile):
                self._file.discard()
                self._file.closed = True  # or its finaliser would create a truncated object
            self._closed = True
            self._turn.notify_all()

    def _failed(self, error: Exception) -> FtckptError:
        if isinstance(error, FtckptError):
            return error
        return translate(error, self._store.describe(self._path), self._path, "write")
