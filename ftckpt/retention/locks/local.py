"""Lock a local root for the one gc that changes it.

The locks are the system's and end with the process, so a killed gc leaves nothing to break.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from ftckpt.errors import DeniedError, NoResourceError, RefusedError, UnsafeError, UnsupportedError
from ftckpt.own_files import FOLDER
from ftckpt.storage.local.folders import opened
from ftckpt.storage.local.oserror import claim, twice
from ftckpt.storage.local.ownership import belongs_to, open_or_make

NAME = "gc.lock"

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def locked(folder: int, url: str, actor: str) -> Iterator[None]:
    """Lock a root: its directory, which needs no disk space, and `.ftckpt/gc.lock`.

    Other machines on a network filesystem see only the file's lock. On a full filesystem the
    directory's lock must suffice. `folder` is the root's open directory; others who find it locked
    see `actor`.

    Raises:
        RefusedError: another process holds it.
        UnsupportedError: the filesystem has no locks.
        UnsafeError: `.ftckpt`, or the file in it, is a link.
        OSError: the system refused.
    """
    with ExitStack() as held:
        with suppress(UnsupportedError):
            _claim(folder, folder, url)
        with suppress(_NoRoom):
            file = _lock_file(folder, url)
            held.callback(os.close, file)
            _claim(file, folder, url)
            _sign(file, actor)
        yield


class _NoRoom(Exception):
    pass


@contextmanager
def lock_beside(folder: int, url: str, actor: str, *, name: str, work: str) -> Iterator[int]:
    """Lock the file `name` in a root's `.ftckpt`, for `work` that does not exclude gc.

    Yields the descriptor that holds the lock: a process that inherits it holds the lock, too.

    Raises:
        RefusedError: another process holds it.
        UnsupportedError: the filesystem has no locks.
        NoResourceError: it is full, and the file is not there yet.
        UnsafeError: `.ftckpt`, or the file in it, is a link.
        OSError: the system refused.
    """
    try:
        file = _lock_file(folder, url, name)
    except _NoRoom as error:
        raise NoResourceError(f"{url} has no room for {FOLDER}/{name}") from error
    try:
        _claim(file, folder, url, name, work)
        _sign(file, actor)
        yield file
    finally:
        os.close(file)


def _sign(file: int, actor: str) -> None:
    with suppress(OSError):  # there may be space for the file and none for its text
        os.ftruncate(file, 0)
        os.pwrite(file, actor.encode(errors="replace") + b"\n", 0)


def _lock_file(folder: int, url: str, name: str = NAME) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with opened(FOLDER, folder, make=True) as own:
            return twice(lambda: open_or_make(name, flags, dir_fd=own))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeError(
                f"{FOLDER}/{name} of {url} is a link: it was not made by ftckpt",
                kind="special-file",
                file=f"{FOLDER}/{name}",
            ) from error
        if error.errno in _NO_SPACE:
            raise _NoRoom from error
        if isinstance(error, PermissionError):
            path = f"{url.rstrip('/')}/{FOLDER}/{name}"
            raise DeniedError(
                f"cannot open {path}: {error.strerror}; {belongs_to(path)}",
                hint=f"chown -R --reference=ROOT ROOT/{FOLDER} gives it to the owner of the root",
                file=f"{FOLDER}/{name}",
            ) from error
        raise


def _claim(file: int, folder: int, url: str, name: str = NAME, work: str = "gc") -> None:
    try:
        claim(file, url)
    except BlockingIOError as error:
        raise RefusedError(
            f"another {work} is at work on {url}{_holder(folder, name)}",
            hint="wait for it, or stop it",
        ) from error


def _holder(folder: int, name: str) -> str:
    try:
        with opened(FOLDER, folder) as own:
            file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=own)
        with open(file, encoding="utf-8", errors="replace") as text:
            holder = text.read(200).strip()
    except OSError:
        return ""
    return f": {holder}" if holder else ""
