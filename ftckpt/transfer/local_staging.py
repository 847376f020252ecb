"""A destination on this machine: built in a hidden directory beside it, shown by one rename.

    .NAME.ftckpt-staging/journal.jsonl     which transfer this is, and which blocks are made; locked
    .NAME.ftckpt-staging/state/            the files of the result

Killed at any instant, NAME is absent or whole. A directory is renamed onto its name, which fails
where a directory with content stands; a single file is linked to it, which fails where any stands.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Mapping, Sequence

from ftckpt.digest import BLOCK, block_length, hash_block
from ftckpt.digest import Block as StoredBlock
from ftckpt.errors import (
    ExistsError,
    FtckptError,
    NoResourceError,
    NotFoundError,
    RefusedError,
)
from ftckpt.manifest import NAME, SUFFIX
from ftckpt.source import Source
from ftckpt.stores.atomic import sync_directory, write_new, write_over
from ftckpt.stores.local import LocalStore
from ftckpt.stores.oserror import translate

from .blocks import BlockMade
from .journal import header, line, read_blocks, read_plan
from .layout import OutputFile
from .staging import StagedFile, Staging

_JOURNAL = "journal.jsonl"
_STATE = "state"
_SPARE = 16 << 20  # room for manifest, journal and directories


def staging_name(name: str) -> str:
    """Return the name of the directory in which `name` is built."""
    return f".{name}.ftckpt-staging"


class LocalStaging(Staging):
    """Builds one directory or one file of this machine.

    Args:
        path: the destination.
        single: whether it is one file.
    """

    def __init__(self, path: str, *, single: bool) -> None:
        self._path = os.path.abspath(os.path.expanduser(path.removeprefix("file://")))
        self._parent, self._name = os.path.split(self._path)
        self._single = single
        self._place = os.path.join(self._parent, staging_name(self._name))
        self._state = os.path.join(self._place, _STATE)
        self._store = LocalStore(self._state)
        self._journal = -1
        self._lock = threading.Lock()
        self._earlier: dict[str, dict[int, BlockMade]] = {}

    def begin(self, plan: str, files: Mapping[str, int], *, restart: bool) -> bool:
        """Lock the staging directory and read its journal; see `Staging.begin`."""
        try:
            if not os.path.isdir(self._parent):
                raise NotFoundError(
                    f"{self._parent} does not exist", hint=f"mkdir -p {self._parent}"
                )
            taken = os.path.lexists(self._path)
            if taken and not os.path.lexists(self._place):
                raise self._exists()
            journal = self._acquire()
            found = read_plan(journal)
            if taken:
                # Killed between the last act and the end of the sweeping up.
                mine = found == plan and self._is_published()
                if mine or not (journal or os.path.lexists(self._state)):
                    self._sweep()
                if not mine:
                    raise self._exists()
                return True
            if found != plan:
                if self._single and os.path.lexists(self._path + SUFFIX):
                    raise self._exists(SUFFIX)
                self._require_free_to_forget(journal, restart)
                self._start_anew(plan)
            else:
                for made in read_blocks(journal):
                    self._earlier.setdefault(made.file, {})[made.number] = made
            os.makedirs(self._state, exist_ok=True)
            self._require_room(sum(files.values()))
        except OSError as error:
            if isinstance(error, FtckptError):
                raise
            raise translate(error, self._path, "write") from error
        return False

    def open(self, file: OutputFile) -> StagedFile:
        """Open a file in the staging directory; its bytes are from earlier, or zero."""
        return StagedFile(
            self._store.upload(file.path, file.size), self._earlier.get(file.path, {})
        )

    def holds(self, file: OutputFile, made: BlockMade) -> bool:
        """Hash the block as it lies there."""
        if made.number * BLOCK >= file.size:
            return False
        length = block_length(file.size, made.number)
        block = StoredBlock(self._store, file.path, file.path, made.number, length)
        try:
            return hash_block(block).digest == made.digest
        except FtckptError:
            return False

    def add(self, made: BlockMade) -> None:
        """Append a line to the journal; not flushed, because bytes are hashed before it counts."""
        data = line(made)
        with self._lock:
            try:
                os.write(self._journal, data)
            except OSError as error:
                raise translate(error, self._place, "write") from error

    def finished(self, file: OutputFile, blocks: Sequence[BlockMade]) -> None:
        """Do nothing: the journal has the blocks."""

    def source(self, commit: Mapping[str, bytes]) -> Source:
        """Write the last small files into the staging directory and list it."""
        for path, data in commit.items():
            write_over(os.path.join(self._state, path), data)
        if self._single:
            return Source.file(self._store, self._store.stat(self._name))
        return Source.directory(self._store)

    def publish(self, commit: Mapping[str, bytes], manifest: bytes) -> None:
        """Rename the staged directory, or link the staged file, to its name."""
        try:
            if self._single:
                self._publish_file(manifest)
            else:
                write_over(os.path.join(self._state, NAME), manifest)
                _sync_tree(self._state)
                if os.path.lexists(self._path):
                    raise self._exists()
                os.rename(self._state, self._path)
            sync_directory(self._parent)
        except OSError as error:
            if isinstance(error, FtckptError):
                raise
            if os.path.lexists(self._path):
                raise self._exists() from error
            raise translate(error, self._path, "write") from error
        self._sweep()

    def close(self) -> None:
        """Unlock; a place where nothing has been built yet is swept away."""
        journal, self._journal = self._journal, -1
        if journal < 0:
            return
        if os.path.isdir(self._state) and not any(names for *_, names in os.walk(self._state)):
            self._sweep()
        os.close(journal)

    def _let_go(self) -> None:
        """Close the journal of somebody else, or of nobody any more."""
        journal, self._journal = self._journal, -1
        os.close(journal)

    def _publish_file(self, manifest: bytes) -> None:
        # The data is what makes it visible, so the manifest goes first; one that a killed run left
        # is of this very transfer, because only its holder comes here.
        beside = self._path + SUFFIX
        if os.path.lexists(beside):
            write_over(beside, manifest)
        else:
            write_new(beside, manifest)
        os.link(os.path.join(self._state, self._name), self._path, follow_symlinks=False)

    def _acquire(self) -> bytes:
        """Create and lock the staging directory; return its journal."""
        while True:
            os.makedirs(self._place, exist_ok=True)
            if not stat.S_ISDIR(os.lstat(self._place).st_mode):
                raise RefusedError(f"{self._place} is no directory", hint="remove it")
            path = os.path.join(self._place, _JOURNAL)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._journal = os.open(path, flags, 0o666)
            try:
                fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self._let_go()
                raise RefusedError(
                    f"another ftckpt is writing {self._path}", hint="wait for it, or stop it"
                ) from error
            # Who held it before may have finished and swept it away since it was opened.
            if _is_same(path, self._journal):
                with open(self._journal, "rb", closefd=False) as file:
                    file.seek(0)
                    return file.read()
            self._let_go()

    def _require_free_to_forget(self, journal: bytes, restart: bool) -> None:
        # A first line that was cut off is of a run that had built nothing yet.
        if (b"\n" in journal or os.path.lexists(self._state)) and not restart:
            raise RefusedError(
                f"{self._place} holds what another transfer to {self._path} has built so far",
                hint="run that one again to finish it, or --restart to forget it",
            )

    def _start_anew(self, plan: str) -> None:
        if os.path.lexists(self._state):
            shutil.rmtree(self._state)
        os.ftruncate(self._journal, 0)
        os.write(self._journal, header(plan))
        os.fsync(self._journal)

    def _require_room(self, nbytes: int) -> None:
        staged = sum(
            os.lstat(os.path.join(folder, name)).st_blocks * 512
            for folder, _, names in os.walk(self._state)
            for name in names
        )
        system = os.statvfs(self._place)
        free = system.f_bavail * system.f_frsize
        if nbytes - staged + _SPARE > free:
            raise NoResourceError(
                f"{self._path} needs {nbytes - staged} bytes more and {free} are free",
                hint="free space, or choose another destination",
            )

    def _sweep(self) -> None:
        """Remove the staging directory; the journal last, because it says what the rest is."""
        shutil.rmtree(self._state, ignore_errors=True)
        for remove, path in (
            (os.unlink, os.path.join(self._place, _JOURNAL)),
            (os.rmdir, self._place),
        ):
            try:
                remove(path)
            except OSError:
                return  # the result is visible and whole; what is left is recognisable

    def _is_published(self) -> bool:
        """Say whether what stands at the destination is what was built here."""
        if not self._single:
            return not os.path.lexists(self._state)
        staged = os.path.join(self._state, self._name)
        return not os.path.lexists(staged) or os.path.samefile(staged, self._path)

    def _exists(self, suffix: str = "") -> ExistsError:
        return ExistsError(
            f"{self._path}{suffix} exists already",
            hint="nothing is overwritten: choose another name",
        )


def _is_same(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _sync_tree(path: str) -> None:
    for folder, _, _ in os.walk(path):
        sync_directory(folder)
