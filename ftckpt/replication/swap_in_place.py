"""Put a mended checkpoint in the place of a damaged one: both whole names, swapped in one act.

    .NAME.ftckpt-staging/journal.jsonl     as for every local staging
    .NAME.ftckpt-staging/state/            the mended one; after the swap, for a moment, the old one
    .ftckpt/damaged/NAME.TIME              the old one: evidence, which nobody removes but the user

Files that are good are not written again: the mended directory holds other names of them.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress

from ftckpt.errors import FtckptError, RefusedError, UnsafeError, UnsupportedError
from ftckpt.own_files import FOLDER, MANIFEST, SUFFIX
from ftckpt.storage.local.atomic import sync_directory, write_new
from ftckpt.storage.local.folders import exchange
from ftckpt.storage.local.oserror import translate
from ftckpt.transfer.staging.local import LocalStaging, sync_tree, walk
from ftckpt.transfer.staging.lock import make_directory
from ftckpt.transfer.write.blocks import read_plan, read_shown

_ELSEWHERE = "--to DST writes the mended checkpoint to another place"


class ExchangeStaging(LocalStaging):
    """Builds the files that are to be mended, and takes the place of what stands there.

    Args:
        path: the damaged checkpoint, real and absolute.
        single: whether it is one file.
        time: when, as it is added to the name of the damaged one: `20260131T120000Z`.

    Attributes:
        kept: where the damaged one was put; "" before that.
    """

    def __init__(self, path: str, *, single: bool, time: str) -> None:
        super().__init__(path, single=single)
        self._time = time
        self.kept = ""

    def settle(self) -> None:
        """Finish what a run had begun that was killed after the swap.

        Raises:
            RefusedError: another run is at it.
        """
        if not os.path.isdir(self._place):
            return
        try:
            journal = self._lock.acquire()
            self._shown = read_shown(journal)
            if self._is_shown():
                self._put_away()
                self._sweep()
            elif read_plan(journal) is None and not os.path.lexists(self._state):
                self._sweep()  # of a run that had built nothing, or had swept up all but this
        except OSError as error:
            raise self._refused(error) from error
        finally:
            self._lock.release()

    def begin(self, plan: str, files: Mapping[str, int], *, restart: bool) -> bool:
        """Lock the staging directory and read its journal.

        Args:
            plan: fingerprint of what is damaged and of what it should be.
            files: size of every file that is built anew, by path.
            restart: forget what earlier runs have left.
        """
        try:
            journal = self._lock.acquire()
            found = read_plan(journal)
            if found != plan or restart:
                # A first line that was cut off is of a run that had built nothing yet.
                if (found is not None or os.path.lexists(self._state)) and not restart:
                    raise RefusedError(
                        f"{self._place} holds what another run to {self._path} has built so far",
                        hint="run that one again to finish it, or --restart to forget it",
                    )
                self._start_anew(plan)
            else:
                self._take_over(journal)
            make_directory(self._state)
            self._tidy(files)
            self._require_exchange()
            self.require_room(sum(files.values()))
        except OSError as error:
            raise self._refused(error) from error
        return False

    def keep(self, built: Collection[str]) -> None:
        """Give everything else of the damaged directory a name in the mended one.

        Args:
            built: paths of files that are not taken over.
        """
        try:
            for folder, directories, names in walk(self._path):
                here = os.path.relpath(folder, self._path)
                there = os.path.normpath(os.path.join(self._state, here))
                os.makedirs(there, exist_ok=True)
                shutil.copymode(folder, there)
                links = [d for d in directories if os.path.islink(os.path.join(folder, d))]
                for name in (*names, *links):
                    path = os.path.normpath(os.path.join(here, name))
                    if path not in built and path != MANIFEST:
                        _name_again(os.path.join(folder, name), os.path.join(there, name))
        except OSError as error:
            raise self._refused(error) from error

    def publish(self, commit: Mapping[str, bytes], manifest: bytes) -> None:
        """Swap the names, then put the damaged one away.

        Args:
            commit: nothing.
            manifest: of the mended checkpoint; b"" for none.
        """
        target = os.path.join(self._state, self._name) if self._single else self._state
        try:
            if manifest and not self._single:
                write_new(os.path.join(self._state, MANIFEST), manifest)
            if os.path.lexists(target):  # of one file perhaps only the manifest was damaged
                sync_tree(self._state)
                self._about_to_show(target)
                exchange(target, self._path)
                sync_directory(self._parent)
                self._put_away()
            if manifest and self._single:
                self._replace_manifest(manifest)
        except OSError as error:
            raise self._refused(error) from error
        self._sweep()

    def _is_shown(self) -> bool:
        return self._shown is not None and os.lstat(self._path).st_ino == self._shown

    def _put_away(self) -> None:
        """Rename what is now in the staging directory to where the damaged ones are kept."""
        damaged = os.path.join(self._state, self._name) if self._single else self._state
        if os.path.lexists(damaged):
            self.kept = self._free_name(self._name)
            os.rename(damaged, self.kept)
            sync_directory(os.path.dirname(self.kept))

    def _replace_manifest(self, manifest: bytes) -> None:
        beside = self._path + SUFFIX
        if os.path.lexists(beside):
            os.rename(beside, self._free_name(self._name + SUFFIX))
        write_new(beside, manifest)

    def _free_name(self, name: str) -> str:
        folder = self._parent
        for part in (FOLDER, "damaged"):
            folder = os.path.join(folder, part)
            make_directory(folder)  # refuses a link
        wanted = path = os.path.join(folder, f"{name}.{self._time}")
        number = 1
        while os.path.lexists(path):
            number += 1
            path = f"{wanted}-{number}"
        return path

    def _require_exchange(self) -> None:
        """Try the swap on two files of our own: known now and not after all the work."""
        one, other = (os.path.join(self._state, name) for name in ("swap-1", "swap-2"))
        for path in (one, other):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))
        try:
            exchange(one, other)
        except UnsupportedError as error:
            error.hint = _ELSEWHERE
            raise
        finally:
            os.unlink(one)
            os.unlink(other)

    def _refused(self, error: OSError) -> FtckptError:
        if isinstance(error, FtckptError):
            return error
        found = translate(error, error.filename or self._path, "write")
        found.hint = f"{found.hint}; {_ELSEWHERE}" if found.hint else _ELSEWHERE
        return found


def _name_again(path: str, name: str) -> None:
    """Give a file another name, or a link a twin; what it leads to is not followed."""
    mode = os.lstat(path).st_mode
    with suppress(FileExistsError):  # of an earlier run
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(path), name)
        elif stat.S_ISREG(mode):
            os.link(path, name, follow_symlinks=False)
        else:
            raise UnsafeError(f"{path} is not a regular file", kind="special-file")
