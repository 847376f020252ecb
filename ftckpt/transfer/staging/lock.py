"""Lock a local staging directory for the one run that holds its journal.

The lock is the system's own and ends with the process, so a killed run leaves nothing to break.

Marks of what built files hold: where one has changed, what was proven before says nothing now.

An object store has marks of its own. A file of this machine has its times, which a server of files
sets by its own clock, and its inode's number, which all its clients see: so two machines that look
at one file make one mark.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from ftckpt.errors import DeniedError, FtckptError, NotFoundError, RefusedError
from ftckpt.storage.local.oserror import claim, translate
from ftckpt.storage.local.ownership import make_folder, open_or_make
from ftckpt.storage.store import Store

_JOURNAL = "journal.jsonl"
_PARTS = "parts"
# Seconds that copies of a run that was killed (`ftckpt.workers.processes`) may take to die: they
# have the lock, so that nobody builds beside them.
_DYING = 0.5
# Seconds that a part waits for another one to write the first line of the journal.
_JOINING = 10.0
# How often others may sweep the directory away before it is taken for one that cannot be made.
_TRIES = 100


def make_directory(path: str) -> None:
    """Make a directory, or find it; one that is reached through a link is not taken.

    Raises:
        RefusedError: something else has the name.
        OSError: the system refused.
    """
    with suppress(FileExistsError):
        make_folder(path)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise RefusedError(f"{path} is not a directory", hint="remove it")


def make_directories(path: str) -> list[str]:
    """Make a directory and those above it that are not there; return them, the deepest first.

    Raises:
        OSError: the system refused.
    """
    made: list[str] = []
    while not os.path.isdir(path):
        made.append(path)
        path = os.path.dirname(path)
    for one in reversed(made):
        with suppress(FileExistsError):  # another run may make it too
            make_folder(one)
    return made


class StagingLock:
    """The staging directory of one destination and its journal, which is the lock.

    Args:
        place: the directory; made when it is acquired.
        wanted: the destination, for messages.
    """

    def __init__(self, place: str, wanted: str) -> None:
        self._place = place
        self._wanted = wanted
        self._path = os.path.join(place, _JOURNAL)
        self._fd = self._part = -1
        self._guard = threading.Lock()

    @property
    def held(self) -> bool:
        """Whether this run has it."""
        return self._fd >= 0

    def acquire(self) -> bytes:
        """Lock the directory and return its journal, empty where it is new.

        Raises:
            RefusedError: another run has it, or something else than a staging directory lies there.
            DeniedError: the filesystem takes no new names.
            UnsupportedError: the filesystem has no locks.
            OSError: the system refused.
        """
        tries = _TRIES
        while True:
            try:
                self._open()
            except FileNotFoundError as error:
                if not os.path.isdir(os.path.dirname(self._place)):
                    raise
                tries -= 1
                if not tries:  # a filesystem in which nothing can be made (procfs)
                    raise DeniedError(f"cannot make {self._wanted}: {error.strerror}") from error
                continue  # who held it swept it away in between
            try:
                self._lock()
                # Who held it before may have finished and swept it away since it was opened.
                if self._is_there():
                    return self._read()
            except BaseException:
                self.release()
                raise
            self.release()

    def join(self, header: bytes, first: Callable[[], None]) -> bytes:
        """Hold the directory together with other parts, and return its journal.

        Who comes first writes the first line, alone. A run that is not a part has it alone, too.

        Args:
            header: the first line.
            first: called before that line is written, by the one that writes it.

        Raises:
            RefusedError: a run that is not a part has it, or something else lies there.
            DeniedError, UnsupportedError, OSError: as `acquire`.
        """
        until = time.monotonic() + _JOINING
        while True:
            for shared in (True, False):
                try:
                    self._open()
                    if self._is_claimed(shared=shared) and self._is_there():
                        data = self._read(mend=False)
                        whole = b"\n" in data  # else a kill has torn the first line
                        if whole and shared:
                            return data
                        if not (whole or shared):
                            first()
                            self.begin_anew(header)
                except FileNotFoundError:
                    if not os.path.isdir(os.path.dirname(self._place)):
                        raise
                except BaseException:
                    self.release()
                    raise
                self.release()
            if time.monotonic() > until:
                raise RefusedError(
                    f"another ftckpt is writing {self._wanted} alone",
                    hint="wait for it, or stop it",
                )
            time.sleep(_DYING / 10)

    def take(self, part: str) -> None:
        """Be the only process that does a part, until `release`.

        Raises:
            RefusedError: another one does it.
        """
        folder = os.path.join(self._place, _PARTS)
        make_directory(folder)
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        self._part = open_or_make(os.path.join(folder, part), flags)
        try:
            claim(self._part, self._wanted, "write to another filesystem")
        except BlockingIOError as error:
            raise RefusedError(
                f"part {part} of {self._wanted} is being done by another process",
                hint="wait for it, or stop it",
            ) from error

    def forget_parts(self) -> None:
        """Remove what parts have locked; the directory is this run's alone."""
        shutil.rmtree(os.path.join(self._place, _PARTS), ignore_errors=True)

    def begin_anew(self, header: bytes) -> None:
        """Forget the journal and write its first line durably."""
        os.ftruncate(self._fd, 0)
        os.write(self._fd, header)
        os.fsync(self._fd)

    def append(self, line: bytes, *, durable: bool = False) -> None:
        """Write one more line; from any thread.

        Raises:
            FtckptError: the system refused.
        """
        # Within the guard, because another file may get the number of one that is closed.
        with self._guard:
            try:
                os.write(self._fd, line)
                if durable:
                    os.fsync(self._fd)
            except OSError as error:
                raise translate(error, self._place, "write") from error

    def remove(self) -> None:
        """Remove journal and directory; still locked, so that nobody begins in between."""
        try:
            os.unlink(self._path)
            os.rmdir(self._place)
        except OSError:
            return  # what is left is recognisable

    def release(self) -> None:
        """Unlock."""
        with self._guard:
            numbers = self._fd, self._part
            self._fd = self._part = -1
        for fd in numbers:
            if fd >= 0:
                os.close(fd)

    def _open(self) -> None:
        make_directory(self._place)
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = open_or_make(self._path, flags)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self.release()
            raise RefusedError(f"{self._path} is not a regular file", hint="remove it")

    def _is_claimed(self, *, shared: bool) -> bool:
        try:
            claim(self._fd, self._wanted, "write to another filesystem", shared=shared)
        except BlockingIOError:
            return False
        return True

    def _lock(self) -> None:
        until = time.monotonic() + _DYING
        while True:
            try:
                claim(self._fd, self._wanted, "write to another filesystem")
                return
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise RefusedError(
                        f"another ftckpt is writing {self._wanted}", hint="wait for it, or stop it"
                    ) from error
            time.sleep(_DYING / 10)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.lstat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _read(self, *, mend: bool = True) -> bytes:
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            data = file.read()
        if mend and data and not data.endswith(b"\n"):
            os.write(self._fd, b"\n")  # a line that a kill has torn must not tear the next one
        return data


def marks_of(store: Store, paths: Iterable[str]) -> dict[str, str]:
    """Return marks that change with files, by path; to be asked for before they are read.

    Where a file has none, it is "", which says nothing.

    Args:
        store: where they lie.
        paths: the files.

    Raises:
        UnavailableError, DeniedError: an object store does not answer.
    """
    wanted = sorted(set(paths))
    if store.traits.local:
        return {path: _times_of(store, path) for path in wanted}
    listed: dict[str, str] = {}
    with suppress(NotFoundError):
        listed = {entry.path: entry.etag or "" for entry in store.walk("")}
    return {path: listed.get(path, "") for path in wanted}


def same(marks: object, now: Mapping[str, str]) -> bool:
    """Say whether files have the marks that a record says."""
    return isinstance(marks, dict) and all(
        bool(mark) and now.get(file) == mark for file, mark in marks.items()
    )


def _times_of(store: Store, path: str) -> str:
    # Opened, because a client of NFS asks its server for the times then.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        number = os.open(store.local_path(path) or "", flags)
    except (FtckptError, OSError):
        return ""
    try:
        found = os.fstat(number)
    finally:
        os.close(number)
    if not stat.S_ISREG(found.st_mode):
        return ""
    return f"{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}:{found.st_ino}"
