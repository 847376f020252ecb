"""The trash of a local root: one rename into `.ftckpt/trash/`, and one back.

All work goes through open directories below the root, none of them a link. A rename needs no free
space except for the name. If the trash directory cannot be made, or lies on another filesystem, the
entry gets a hidden name beside its old one.

The manifest of a one-file checkpoint is moved after it and restored before it. A kill in between
leaves the manifest alone, and the next process that locks the root moves it.

Work on a full filesystem, which cannot even rename a file.

XFS needs a block for a directory that grows by a name, and refuses the rename without one. Files
can always be removed, and mode bits changed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.roots import Root
from ftckpt.errors import ExistsError, FtckptError, NotFoundError, RefusedError, UnsafeError
from ftckpt.own_files import FOLDER as OWN
from ftckpt.own_files import SUFFIX
from ftckpt.retention.locks.local import locked
from ftckpt.retention.policy.plan import Decision
from ftckpt.retention.records import own_folder
from ftckpt.retention.scan.classify import marker_of
from ftckpt.retention.scan.entry import ScannedEntry, list_entry
from ftckpt.retention.trash import BESIDE, FOLDER, Erased, Trashed, parse_trash_name, trash_name
from ftckpt.storage.local.atomic import sync_open_directory
from ftckpt.storage.local.folders import Removal, is_file, opened, rename_new, status
from ftckpt.storage.local.oserror import translate, twice
from ftckpt.storage.store import EntryKind, join, relative

# No trainer makes a directory with this mode.
_MARK = stat.S_ISVTX | stat.S_IRWXU
# It means nothing on a directory, and only its owner can set it.
_SIGNED = stat.S_ISUID


# A filesystem with less is full, whatever small reserve it keeps for itself.
_LITTLE = 1 << 20


def is_full(folder: int) -> bool:
    """Whether the filesystem of an open directory has no room left, for bytes or for names."""
    system = os.fstatvfs(folder)
    no_names = system.f_files > 0 and system.f_favail == 0
    return no_names or system.f_bavail * system.f_frsize < _LITTLE


def taken_apart(found: ScannedEntry, here: int) -> Iterator[None]:
    """Remove an entry of the root `here` file by file; yield after each, when there may be room.

    The commit marker goes first, so that nobody takes the rest for a checkpoint.

    Raises:
        FtckptError, OSError: it could not be listed, or a file not be removed.
    """
    store = found.root.store
    files = list_entry(store, found.place)
    marker = marker_of(store, found.child.part, files) if found.child is not None else None
    for file in sorted(files, key=lambda file: (file != marker, file.path)):
        _unlink(relative(found.root.base, file.path), here)
        yield


def _unlink(path: str, folder: int) -> None:
    *above, name = path.split("/")
    with ExitStack() as held:
        for each in above:
            folder = held.enter_context(opened(each, folder))
        os.unlink(name, dir_fd=folder)


def mark(name: str, folder: int) -> None:
    """Mark a directory that cannot be renamed as being freed; a file needs no mark."""
    found = status(name, folder)
    if found is not None and stat.S_ISDIR(found.st_mode):
        with opened(name, folder) as marked:
            os.fchmod(marked, _MARK)
            os.fsync(marked)


def is_marked(name: str, folder: int) -> bool:
    """Whether a name is a directory that is being freed."""
    found = status(name, folder)
    return (
        found is not None and stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == _MARK
    )


def sign(name: str, folder: int) -> None:
    """Sign a directory that was dropped beside its old name, so that purge knows whose act it was.

    A directory of somebody else stays unsigned; a file needs no sign.
    """
    _sign(name, folder, lambda mode: mode | _SIGNED)


def unsign(name: str, folder: int) -> None:
    """Take the sign off a directory that is restored."""
    _sign(name, folder, lambda mode: mode & ~_SIGNED)


def is_signed(found: os.stat_result) -> bool:
    """Whether a directory has the sign of `sign`, or of `mark`, which only its owner gives."""
    return bool(found.st_mode & _SIGNED) or stat.S_IMODE(found.st_mode) == _MARK


def _sign(name: str, folder: int, change: Callable[[int], int]) -> None:
    found = status(name, folder)
    if found is not None and stat.S_ISDIR(found.st_mode):
        with suppress(PermissionError), opened(name, folder) as signed:
            os.fchmod(signed, change(stat.S_IMODE(os.fstat(signed).st_mode)))


_NOT_WHOLE = "{} is being reclaimed: it is not whole any more"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_TRASH = _NO_SPACE | {errno.EMLINK, errno.EXDEV}


class LocalTrash:
    """The trash of one local root (see `trash.Trash`)."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._here = -1

    @contextmanager
    def lock(self, actor: str, now: float) -> Iterator[None]:
        """Lock the root, and repair what a killed run left."""
        with ExitStack() as held:
            with self._translated("lock", ""):
                self._here = held.enter_context(_root_folder(self._root))
                held.enter_context(locked(self._here, self._root.url, actor))
                self._settle()
            yield
            with self._translated("flush", ""):
                self._flush()

    def discard(
        self,
        found: ScannedEntry,
        decision: Decision,
        *,
        actor: str,
        now: float,
        final: bool = False,
    ) -> Trashed:
        """Rename an entry into the trash."""
        name = relative(self._root.base, found.place.path)
        with self._translated("drop", name):
            self._require_itself(name, found.place.kind)
            try:
                return self._moved(name, now)
            except OSError as error:
                if error.errno == errno.EBUSY:
                    raise RefusedError(
                        f"{self._url(name)} stays: another filesystem is mounted there",
                        hint="unmount it, or pin it",
                    ) from error
                # This cannot be undone. Unless the caller wants that, one error of the system, such
                # as a quota, is not enough.
                if error.errno not in _NO_SPACE or not (final or is_full(self._here)):
                    raise
                return self._forced(found, name, now, error)

    def listed(self) -> list[Trashed]:
        """Return the trash, the earliest first."""
        store, base = self._root.store, self._root.base
        folder = f"{own_folder(self._root)}/{FOLDER}"
        paths = [join(base, name) for name in store.names(base) if name.startswith(BESIDE)]
        with suppress(NotFoundError):
            if store.stat(folder).link is not None:
                raise UnsafeError(
                    f"{store.describe(folder)} is a link: it was not made by ftckpt",
                    kind="special-file",
                    file=f"{OWN}/{FOLDER}",
                )
            paths += [f"{folder}/{name}" for name in store.names(folder)]
        found = [t for path in paths if (t := self._parsed(path)) is not None]
        data = {(t.name + SUFFIX, t.time) for t in found}
        things = (t for t in found if (t.name, t.time) not in data)
        return sorted(things, key=lambda t: (t.time, t.name))

    def restore(self, trashed: Trashed) -> None:
        """Rename a thing back to its old name, which must be free."""
        if trashed.erasing:
            raise RefusedError(_NOT_WHOLE.format(trashed.name))
        here, there, back = self._here, _last(trashed.path), trashed.name
        with self._translated("restore", back), self._folder_of(trashed) as folder:
            if is_marked(there, folder):
                raise RefusedError(_NOT_WHOLE.format(back))
            held = status(there, folder)
            if held is not None and not (stat.S_ISDIR(held.st_mode) or stat.S_ISREG(held.st_mode)):
                raise UnsafeError(
                    f"{trashed.id} in the trash is a link or a device: gc drops none",
                    hint="ftckpt did not put it there; see who may write there, then remove it",
                    kind="special-file",
                    file=back,
                )
            if status(back, here) is not None:
                raise ExistsError(f"{self._url(back)} exists already")
            sealed = is_file(there + SUFFIX, folder)
            if sealed:
                rename_new(there + SUFFIX, back + SUFFIX, source_dir=folder, target_dir=here)
            try:
                rename_new(there, back, source_dir=folder, target_dir=here)
            except OSError:
                if sealed:  # its manifest does not describe what stands there now
                    rename_new(back + SUFFIX, there + SUFFIX, source_dir=here, target_dir=folder)
                raise
            if there.startswith(BESIDE):
                unsign(back, here)

    def is_whole(self, trashed: Trashed) -> bool:
        """Whether a format knows a thing that nobody has begun to free."""
        if trashed.erasing:
            return False
        try:
            part = self._root.ask(self._root.store.stat(trashed.path))
        except NotFoundError:
            return False
        return part is not None and part.recognition.commit is not CommitState.UNCOMMITTED

    def recall(self, trashed: Trashed) -> bool:
        """Return False: the rename is the drop and its record."""
        return False

    def is_ours(self, trashed: Trashed) -> bool:
        """Whether the owner of a directory has put it into the trash.

        Only who may write a directory can move it to another one. But anybody who may write the
        root can rename it there, to a name that looks like trash.
        """
        there = _last(trashed.path)
        if not there.startswith(BESIDE):
            return True
        with self._translated("look at", trashed.name):
            found = status(there, self._here)
            shared = os.fstat(self._here).st_mode
        writable = shared & (stat.S_IWGRP | stat.S_IWOTH) and not shared & stat.S_ISVTX
        return found is None or not stat.S_ISDIR(found.st_mode) or not writable or is_signed(found)

    def erase(self, trashed: Trashed) -> Erased:
        """Rename a thing so that it cannot be restored, and remove it file by file."""
        there = _last(trashed.path)
        prefix = there[: len(there) - len(trashed.id)]
        with self._translated("reclaim", trashed.name), self._folder_of(trashed) as folder:
            if trashed.erasing:
                doomed = there
            else:
                doomed = self._condemned(there, prefix, trashed, folder)
            removal = Removal()
            # The manifest first: alone it would look like an entry of its own.
            manifest = prefix + trashed.id + SUFFIX
            removal.remove(manifest, folder, self._url(trashed.name + SUFFIX))
            removal.remove(doomed, folder, self._url(trashed.name))
        return Erased(removal.freed, removal.failed)

    def _require_itself(self, name: str, kind: EntryKind) -> None:
        """Refuse an entry that has been replaced since it was listed."""
        found = twice(lambda: os.stat(name, dir_fd=self._here, follow_symlinks=False))
        right = stat.S_ISDIR if kind is EntryKind.DIRECTORY else stat.S_ISREG
        if not right(found.st_mode):
            raise UnsafeError(
                f"{self._url(name)} is not the {kind} any more that it was: nothing is dropped",
                kind="special-file",
                file=name,
            )

    def _moved(self, name: str, now: float, *, erasing: bool = False) -> Trashed:
        """Rename an entry into the trash, or to a hidden name beside it."""
        base = self._root.base
        try:
            with self._trash_folder(make=True) as folder:
                return self._renamed(
                    name, now, folder, join(base, f"{OWN}/{FOLDER}/"), erasing=erasing
                )
        except OSError as error:
            if error.errno not in _NO_TRASH:
                raise
            return self._renamed(name, now, self._here, join(base, BESIDE), erasing=erasing)

    def _renamed(
        self, name: str, now: float, folder: int, prefix: str, *, erasing: bool
    ) -> Trashed:
        """Rename an entry, and then its manifest, to a free name in the trash."""
        beside = _last(prefix)
        while status(beside + trash_name(name, now, erasing=erasing), folder) is not None:
            now += 1e-6
        path = prefix + trash_name(name, now, erasing=erasing)
        trashed = Trashed(name, now, self._root.base, path, erasing)
        sealed = is_file(name, self._here)
        rename_new(name, _last(path), source_dir=self._here, target_dir=folder)
        if beside.startswith(BESIDE):
            sign(_last(path), folder)
        if sealed:
            self._move_manifest(trashed, folder)
        return trashed

    def _forced(self, found: ScannedEntry, name: str, now: float, error: OSError) -> Trashed:
        """Delete an entry file by file until there is room for the name of the rest."""
        for _ in taken_apart(found, self._here):
            try:
                return self._moved(name, now, erasing=True)
            except FileNotFoundError:  # it was one file
                continue
            except OSError as again:
                if again.errno not in _NO_SPACE:
                    raise
        Removal().remove(name, self._here, name)  # directories alone
        if status(name, self._here) is not None:
            raise error
        path = join(self._root.base, BESIDE + trash_name(name, now, erasing=True))
        return Trashed(name, now, self._root.base, path, erasing=True)

    def _condemned(self, there: str, prefix: str, trashed: Trashed, folder: int) -> str:
        """Mark a thing as not restorable; return its new name."""
        doomed = prefix + trash_name(trashed.name, trashed.time, erasing=True)
        try:
            rename_new(there, doomed, source_dir=folder, target_dir=folder)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            mark(there, folder)
            return there
        _sync(self._here)
        _sync(folder)
        return doomed

    def _move_manifest(self, trashed: Trashed, folder: int) -> None:
        """Move the manifest after its file; the next process that locks the root retries."""
        with suppress(OSError):
            rename_new(
                trashed.name + SUFFIX,
                _last(trashed.path) + SUFFIX,
                source_dir=self._here,
                target_dir=folder,
            )

    def _settle(self) -> None:
        """Move manifests that a killed run left alone to their files in the trash."""
        names = set(twice(lambda: os.listdir(self._here)))
        for trashed in reversed(self.listed()):
            if trashed.erasing or trashed.name in names or trashed.name + SUFFIX not in names:
                continue
            with self._folder_of(trashed) as folder:
                there = _last(trashed.path)
                if is_file(there, folder) and status(there + SUFFIX, folder) is None:
                    self._move_manifest(trashed, folder)
                    names.discard(trashed.name + SUFFIX)

    def _flush(self) -> None:
        _sync(self._here)
        with suppress(FileNotFoundError), self._trash_folder() as folder:
            _sync(folder)

    @contextmanager
    def _trash_folder(self, *, make: bool = False) -> Iterator[int]:
        with (
            opened(OWN, self._here, make=make) as own,
            opened(FOLDER, own, make=make) as folder,
        ):
            yield folder

    @contextmanager
    def _folder_of(self, trashed: Trashed) -> Iterator[int]:
        if _last(trashed.path).startswith(BESIDE):
            yield self._here
        else:
            with self._trash_folder() as folder:
                yield folder

    def _parsed(self, path: str) -> Trashed | None:
        parsed = parse_trash_name(_last(path))
        return parsed and Trashed(parsed[0], parsed[1], self._root.base, path, parsed[2])

    def _url(self, name: str) -> str:
        return self._root.store.describe(join(self._root.base, name))

    @contextmanager
    def _translated(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except FtckptError:
            raise
        except OSError as error:
            raise translate(error, self._url(name), doing, name or None) from error


@contextmanager
def _root_folder(root: Root) -> Iterator[int]:
    """Open a root's directory; no link is followed below the user's place."""
    path = root.store.local_path() or "."
    here = twice(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        for name in filter(None, root.base.split("/")):
            with opened(name, here) as below:
                os.dup2(below, here, inheritable=False)
        yield here
    finally:
        os.close(here)


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _sync(folder: int) -> None:
    """Flush a directory; a full disk may refuse that after a successful rename."""
    try:
        twice(lambda: sync_open_directory(folder))
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
