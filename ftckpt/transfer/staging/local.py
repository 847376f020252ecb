"""Build a local result in a hidden directory beside it, and rename it once at the end.

    .NAME.ftckpt-staging/journal.jsonl     which transfer this is, and which blocks are made; locked
    .NAME.ftckpt-staging/state/            the files of the result
    .NAME.ftckpt-staging/state/.ftckpt/staging     what parts call it; removed before it is shown

Killed at any instant, NAME is absent or whole. A directory is renamed onto its name, which fails
where a directory with content stands; a single file is linked to it, which fails where any stands,
and so is its manifest before it. What a killed run has built is taken over by the next of the same
transfer, and what it has only begun is forgotten by any.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from shlex import quote

from ftckpt.amounts import human_bytes
from ftckpt.digests.blocks import Block as StoredBlock
from ftckpt.digests.blocks import block_count, block_length, hash_block
from ftckpt.errors import ExistsError, FtckptError, NoResourceError, NotFoundError, RefusedError
from ftckpt.extents import BLOCK
from ftckpt.own_files import FOLDER, MANIFEST, SUFFIX
from ftckpt.storage.local.atomic import link_new, sync_directory, write_new, write_over
from ftckpt.storage.local.oserror import translate
from ftckpt.storage.local.pagecache import read_cached
from ftckpt.storage.local.store import LocalStore
from ftckpt.storage.source import Source
from ftckpt.storage.suggestions import existing, hint_for_slip
from ftckpt.transfer.layout import OutputFile
from ftckpt.transfer.places import staging_name
from ftckpt.transfer.staging import StagedFile, Staging
from ftckpt.transfer.write.blocks import (
    BlockMade,
    header,
    line,
    read_blocks,
    read_place,
    read_plan,
    read_shown,
    shown_line,
)

from .lock import StagingLock, make_directories, make_directory

_STATE = "state"
_TOKEN = os.path.join(FOLDER, "staging")
_SPARE = 16 << 20  # room for manifest, journal and directories


def built_below(path: str) -> LocalStore:
    """Return where the files of a destination lie while parts build them."""
    parent, name = os.path.split(path)
    return LocalStore(os.path.join(parent, staging_name(name), _STATE))


class LocalStaging(Staging):
    """Builds one directory or one file of this machine.

    Args:
        path: the destination, absolute.
        single: whether it is one file.
    """

    by_processes = True

    def __init__(self, path: str, *, single: bool) -> None:
        self._path = path
        self._parent, self._name = os.path.split(path)
        self._single = single
        self._place = os.path.join(self._parent, staging_name(self._name))
        self._state = os.path.join(self._place, _STATE)
        self._store = built_below(path)
        self._lock = StagingLock(self._place, self._path)
        self._earlier: dict[str, dict[int, BlockMade]] = {}
        self._shown: int | None = None
        self._believed: set[tuple[str, int, bytes]] = set()
        self._of_parts: set[str] = set()
        self._called = ""
        self._joined = False
        self._made: list[str] = []  # directories above it that were not there, the deepest first

    def begin(self, plan: str, files: Mapping[str, int], *, restart: bool) -> bool:
        """Lock the staging directory and read its journal; see `Staging.begin`."""
        try:
            self._require_parent()
            if os.path.lexists(self._path) and not os.path.lexists(self._place):
                raise self._exists()
            journal = self._lock.acquire()
            found, self._shown = read_plan(journal), read_shown(journal)
            self._called = read_place(journal)
            # Asked again: who held the lock may have finished since.
            if os.path.lexists(self._path):
                # Killed between the last act and the end of the sweeping up.
                if os.lstat(self._path).st_ino == self._shown:
                    self._sweep()
                    if found == plan:
                        return True
                raise self._exists()
            if found != plan or restart:
                self._require_free_to_forget(restart)
                self._start_anew(plan)
            else:
                self._take_over(journal)
            make_directory(self._state)
            self._tidy(files)
            if self._single:
                self._require_links()
            self.require_room(sum(files.values()))
        except OSError as error:
            if isinstance(error, FtckptError):
                raise
            # That the staging directory cannot be made says of the destination that it cannot.
            place = error.filename if error.filename != self._place else None
            raise translate(error, place or self._path, "write") from error
        return False

    def join(self, plan: str, files: Mapping[str, int], part: str) -> str:
        """Share the staging directory with the other parts of one plan; see `Staging.join`."""
        import secrets

        try:
            self._require_parent()
            if os.path.lexists(self._path):
                raise self._exists()
            token = secrets.token_hex(8)
            journal = self._lock.join(header(plan, token), lambda: self._call(token))
            self._joined = True
            if os.path.lexists(self._path):  # who finished has done so meanwhile
                raise self._exists()
            called = read_place(journal)
            if read_plan(journal) != plan or not called:
                raise RefusedError(
                    f"{self._place} holds what another transfer to {self._path} has built so far",
                    hint=f"run that one again to finish it, or remove {quote(self._place)}",
                )
            self._require_called(called)
            self._lock.take(part)
            self.require_room(sum(files.values()))
        except OSError as error:
            if isinstance(error, FtckptError):
                raise
            raise translate(error, self._path, "write") from error
        return called

    def cuts(self, size: int, share: int) -> bool:
        """Say yes: files have their full size from the beginning, and blocks their own places."""
        return True

    @property
    def built(self) -> LocalStore:
        """Where the files lie that are being built."""
        return self._store

    def believe(self, blocks: Iterable[BlockMade], built: str) -> None:
        """Take blocks for made; who proves the result reads them."""
        if self._called != built:
            raise self._built_anew()
        # Killed between the last act and the one before: then it is what was about to be shown.
        if self._shown is None or self._shown != os.lstat(self._state).st_ino:
            self._require_called(built)
        for made in blocks:
            self._earlier.setdefault(made.file, {})[made.number] = made
            self._believed.add((made.file, made.number, made.digest))
            self._of_parts.add(made.file)

    def open(self, file: OutputFile, *, at_most: bool = False) -> StagedFile:
        """Open a file in the staging directory; its bytes are from earlier, or zero."""
        shared, size = self._joined, file.size
        if file.path in self._of_parts:
            shared = True
            size = self._require_whole(file, at_most=at_most)
        upload = self._store.upload(file.path, size)
        upload.shared = shared
        return StagedFile(upload, self._earlier.get(file.path, {}))

    def holds(self, file: OutputFile, made: BlockMade) -> bool:
        """Hash the block as it lies there."""
        if made.number * BLOCK >= file.size:
            return False
        if (file.path, made.number, made.digest) in self._believed:
            return True
        length = block_length(file.size, made.number)
        block = StoredBlock(self._store, file.path, file.path, made.number, length)
        try:
            return hash_block(block).digest == made.digest
        except FtckptError:
            return False

    def peek(self, path: str, offset: int, view: memoryview) -> bool:
        """Read what the system still has in memory of what was written."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            number = os.open(self._store.local_path(path), flags)
        except OSError:  # it has not been begun
            return False
        try:
            return read_cached(number, offset, view)
        finally:
            os.close(number)

    def add(self, made: BlockMade) -> None:
        """Append a line to the journal; not flushed, because bytes are hashed before it counts.

        Parts keep records of their own: machines cannot append to one file at once.
        """
        if self._joined:
            return
        self._lock.append(line(made))

    def finished(self, file: OutputFile, blocks: Sequence[BlockMade]) -> None:
        """Do nothing: the journal has the blocks."""

    def source(self, commit: Mapping[str, bytes]) -> Source:
        """Write the last small files into the staging directory and list it."""
        for path, data in commit.items():
            write_over(os.path.join(self._state, path), data)
        if self._single:
            return Source.file(self._store, self._store.stat(self._name))
        return Source.directory(self._store)

    def date(self, times: Mapping[str, float]) -> None:
        """Set the times of staged files."""
        for path, time in times.items():
            staged = os.path.join(self._state, path)
            try:
                os.utime(staged, (time, time), follow_symlinks=False)
            except OSError as error:
                raise translate(error, staged, "write", path) from error

    def publish(self, commit: Mapping[str, bytes], manifest: bytes) -> None:
        """Rename the staged directory, or link the staged file, to its name."""
        try:
            if self._single:
                self._publish_file(manifest)
            else:
                write_over(os.path.join(self._state, MANIFEST), manifest)
                sync_tree(self._state)
                if os.path.lexists(self._path):
                    raise self._exists()
                self._about_to_show(self._state)
                self._call("")
                os.rename(self._state, self._path)
            sync_directory(self._parent)
        except OSError as error:
            if isinstance(error, FtckptError):
                raise
            if os.path.lexists(self._path):
                raise self._exists() from error
            raise translate(error, self._path, "write") from error
        self._sweep()

    def forget(self) -> None:
        """Remove everything: the lock says that it is this run's alone."""
        if self._lock.held:
            self._remove_built()
            self._sweep()

    def close(self) -> None:
        """Unlock; a place where nothing has been built yet is swept away."""
        if self._joined:
            self._lock.release()
            return
        if self._lock.held:
            self._unlock()
        for made in self._made:
            with suppress(OSError):  # it holds something now
                os.rmdir(made)

    def _call(self, token: str) -> None:
        """Keep in the directory of the files what parts call it; "" removes that."""
        path = os.path.join(self._state, _TOKEN)
        if token:
            make_directory(self._state)
            write_over(path, token.encode())
        elif os.path.lexists(path):
            os.unlink(path)
            with suppress(OSError):  # something of the result lies there too
                os.rmdir(os.path.dirname(path))

    def _require_called(self, token: str) -> None:
        """Refuse files that are not those among which parts have written.

        The journal alone cannot say it: somebody may have removed the files beside it.
        """
        try:
            with open(os.path.join(self._state, _TOKEN), "rb") as file:
                found = file.read(64).decode("ascii", "replace")
        except (FileNotFoundError, NotADirectoryError):
            found = ""
        if found != token:
            raise self._built_anew()

    def _built_anew(self) -> RefusedError:
        return RefusedError(
            f"{self._place} was built anew since the parts were done, or its files were removed",
            hint=f"remove {quote(self._place)} and the records of the parts, and run them again",
        )

    def _require_whole(self, file: OutputFile, *, at_most: bool) -> int:
        """Return the size of a file that parts have written; refuse one that is not there now."""
        try:
            size = os.lstat(os.path.join(self._state, file.path)).st_size
        except FileNotFoundError:
            size = -1
        blocks = len(self._earlier[file.path])
        # Of a file whose size nobody knew before, the parts say how many blocks it has.
        whole = max(1, block_count(size)) == blocks if at_most else size == file.size
        if size < 0 or not whole:
            raise RefusedError(
                f"{file.path} in {self._place} is not what the parts have written",
                hint="remove the records of the parts, and run them again",
            )
        return size

    def _require_parent(self) -> None:
        """Make the directory around the destination, unless its path looks mistyped."""
        if os.path.isdir(self._parent):
            return
        there = existing(self._parent)
        if not os.path.isdir(there):
            raise NotFoundError(f"{there} is not a directory", hint="choose another destination")
        slip = hint_for_slip(self._path)
        if slip:
            raise NotFoundError(f"{self._parent} does not exist", hint=slip)
        self._made = make_directories(self._parent)

    def _unlock(self) -> None:
        # What cannot be looked at may be much: it is left, with the journal that says what it is.
        with suppress(OSError):
            if not self._has_built():
                self._sweep()
        self._lock.release()

    def _take_over(self, journal: bytes) -> None:
        for made in read_blocks(journal):
            self._earlier.setdefault(made.file, {})[made.number] = made

    def _has_built(self) -> bool:
        """Say whether a run has come as far as its first file, and may have shown something."""
        if self._shown is not None:
            return True
        token = os.path.join(self._state, _TOKEN)
        return any(
            os.path.join(folder, name) != token
            for folder, _, names in walk(self._state)
            for name in names
        )

    def _publish_file(self, manifest: bytes) -> None:
        # The data is what makes it visible, so the manifest goes first; one that stands there
        # already is ours only where a killed run of this transfer came as far as this.
        beside, staged = self._path + SUFFIX, os.path.join(self._state, self._name)
        if os.path.lexists(self._path):
            raise self._exists()
        again = self._shown is not None
        if not again:
            self._require_no_record()
        write_over(staged + SUFFIX, manifest)
        self._about_to_show(staged)
        if again and os.path.lexists(beside):
            os.rename(staged + SUFFIX, beside)
        else:
            link_new(staged + SUFFIX, beside)
        sync_directory(self._parent)
        link_new(staged, self._path)

    def _about_to_show(self, path: str) -> None:
        """Note what is shown next, by which a later run tells it from what somebody else made."""
        self._shown = os.lstat(path).st_ino
        self._lock.append(shown_line(self._shown), durable=True)

    def _require_free_to_forget(self, restart: bool) -> None:
        if self._has_built() and not restart:
            raise RefusedError(
                f"{self._place} holds what another transfer to {self._path} has built so far",
                hint="run that one again to finish it, or --restart to forget it",
            )
        if self._single and self._shown is None:
            self._require_no_record()

    def _require_no_record(self) -> None:
        """Refuse a manifest of which nothing here says that a killed run has left it."""
        beside = self._path + SUFFIX
        if os.path.lexists(beside):
            raise ExistsError(
                f"{beside} exists already, and no {self._name} that it describes",
                hint=f"rm {quote(beside)} if that file is gone for good, or choose another name",
            )

    def _tidy(self, files: Mapping[str, int]) -> None:
        """Remove what is not a file of the result: it would be shown with it.

        A run that was killed as it wrote a small file leaves its temporary name.
        """
        for folder, _, names in walk(self._state):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.relpath(path, self._state) not in (*files, _TOKEN):
                    os.unlink(path)

    def _require_links(self) -> None:
        """Try a hard link, by which one file is shown: known now and not after all the work."""
        probe = os.path.join(self._state, "links")
        with suppress(ExistsError):
            write_new(probe, b"")
        os.unlink(probe)

    def _start_anew(self, plan: str) -> None:
        self._remove_built()
        self._lock.begin_anew(header(plan))

    def _remove_built(self) -> None:
        if self._single and self._shown is not None and os.path.lexists(self._path + SUFFIX):
            os.unlink(self._path + SUFFIX)  # of the run that is forgotten
        if os.path.lexists(self._state):
            make_directory(self._state)  # refuses a link
            shutil.rmtree(self._state)
        self._shown = None

    def require_room(self, nbytes: int) -> None:
        """Compare what is still to be written with what is free."""
        staged = sum(
            os.lstat(os.path.join(folder, name)).st_blocks * 512
            for folder, _, names in walk(self._state)
            for name in names
        )
        system = os.statvfs(self._place)
        free = system.f_bavail * system.f_frsize
        needed = max(0, nbytes - staged) + _SPARE
        if needed > free:
            raise NoResourceError(
                f"{self._path} needs {human_bytes(needed)} more, {human_bytes(_SPARE)} of them for "
                f"what is kept beside the data, and {human_bytes(free)} are free",
                hint="free space, or choose another destination",
            )

    def _sweep(self) -> None:
        """Remove the staging directory; the journal last, because it says what the rest is."""
        shutil.rmtree(self._state, ignore_errors=True)
        self._lock.forget_parts()
        if not os.path.lexists(self._state):
            self._lock.remove()

    def _exists(self) -> ExistsError:
        built = f"; what was built lies in {self._place}" if os.path.lexists(self._state) else ""
        return ExistsError(
            f"{self._path} exists already",
            hint=f"nothing is overwritten: choose another name{built}",
        )


def walk(path: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what `os.walk` does; where no directory is, nothing.

    Raises:
        OSError: a directory cannot be listed, which `os.walk` passes over.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise error

    return os.walk(path, onerror=refuse)


def sync_tree(path: str) -> None:
    """Flush the names in a directory and in all below it."""
    for folder, _, _ in walk(path):
        sync_directory(folder)
