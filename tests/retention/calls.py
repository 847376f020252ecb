"""The calls that change a filesystem, counted; some of them fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ftckpt.storage.local import folders

_CALLS = ("open", "mkdir", "write", "pwrite", "ftruncate", "fsync", "unlink", "rmdir")


class Killed(BaseException):
    """The process ends here, as far as what it leaves on the disk goes."""


class Calls:
    """Counts calls that change something, and lets some of them fail.

    Args:
        first: the number of the first that fails, from 1.
        code: with which number of an error; None for `Killed`.
        forever: whether all after it fail too.
    """

    def __init__(self, first: int, code: int | None, *, forever: bool = False) -> None:
        self.first = first
        self.code = code
        self.forever = forever
        self.seen = 0

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Let them fail within."""
        with pytest.MonkeyPatch.context() as patch:
            for name in _CALLS:
                patch.setattr(os, name, self._counted(name, getattr(os, name)))
            patch.setattr(folders, "renameat2", self._renaming(folders.renameat2))
            yield

    def _error(self) -> int:
        """Return the error that the call which is made now ends with, 0 for none."""
        self.seen += 1
        if self.seen != self.first and not (self.forever and self.seen > self.first):
            return 0
        if self.code is None:
            raise Killed
        return self.code

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            error = self._error() if name != "open" or args[1] & os.O_CREAT else 0
            if error:
                raise OSError(error, os.strerror(error))
            return real(*args, **more)

        return call

    def _renaming(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(*names: Any) -> int:
            return self._error() or real(*names)

        return call
