"""Give each run its own copy of a checkpoint, so that training never writes the original.

Each file is cloned (FICLONE: Btrfs, XFS, OCFS2 and others share its blocks until one side writes),
or copied if the filesystem cannot clone. Hard links are never made: `open(file, "wb")` writes
through a link into the original.

A link inside the checkpoint stays a link, to the same file of the copy; one that leads out of it
becomes a copy of its target. So nothing in the copy leads back to the original.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ftckpt.amounts import human_bytes
from ftckpt.errors import NoResourceError, UnsafeError
from ftckpt.findings import counted
from ftckpt.storage.local.oserror import translate

# ioctl FICLONE, `linux/fs.h`: _IOW(0x94, 9, int).
_FICLONE = 0x40049409
# Errors of a filesystem that cannot clone, or not between these two files.
_CANNOT_CLONE = frozenset(
    {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM,
     errno.EBADF}
)  # fmt: skip
# Left free beside the copy, for logs and the training's saves.
_SPARE = 64 << 20

# Size, time of the last change of content and of anything, and inode of a file.
Fingerprint = Mapping[str, tuple[int, int, int, int]]


@dataclass(frozen=True, slots=True)
class RunCopy:
    """How a run got its own copy of the checkpoint, and the cost.

    Attributes:
        run: folder of the run.
        method: `reflink` (blocks are shared until one side writes), `copy`, or `mixed`.
        files: number of files.
        nbytes: their total size.
        written: bytes that were copied; 0 if all were cloned.
        seconds: duration.
    """

    run: str
    method: Literal["reflink", "copy", "mixed"]
    files: int
    nbytes: int
    written: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Item:
    """One entry of a copy: a directory, a file with its source, or a link with its target."""

    place: str
    source: str
    nbytes: int = 0
    link: str | None = None
    directory: bool = False


def require_room(source: Path, folder: Path) -> None:
    """Check, before anything runs, that one copy of `source` fits into `folder`.

    Raises:
        NoResourceError: it does not, and the filesystem cannot clone files.
        NotFoundError, DeniedError, UnsafeError, UnavailableError: `source` cannot be copied.
    """
    try:
        files = [item for item in _items(source) if not item.directory and item.link is None]
        probe = next((item.source for item in files if item.nbytes), "")
        if probe and _can_clone(probe, folder):
            return
        _require_free(source, folder, sum(item.nbytes for item in files), len(files))
    except OSError as error:
        raise translate(error, str(source), "copy") from error


def copy_checkpoint(source: Path, target: Path, run: str) -> RunCopy:
    """Copy a checkpoint, a file or a directory, to `target`, which does not exist.

    Times are kept, because trainers look for the newest file. Everything is made writable.

    Raises:
        NoResourceError: there is not enough room for files that cannot be cloned.
        NotFoundError, DeniedError, UnsafeError, UnavailableError: it cannot be read or written.
    """
    begin = time.monotonic()
    cloned = written = nbytes = files = 0
    try:
        items = list(_items(source))
        left = sum(item.nbytes for item in items)
        target.parent.mkdir(parents=True, exist_ok=True)
        for item in items:
            place = os.path.join(target, item.place) if item.place else str(target)
            if item.directory:
                os.mkdir(place)
            elif item.link is not None:
                os.symlink(item.link, place)
            else:
                files, nbytes = files + 1, nbytes + item.nbytes
                if _clone(item.source, place):
                    cloned += 1
                else:
                    if not written:
                        _require_free(source, target.parent, left, len(items))
                    shutil.copyfile(item.source, place)
                    written += item.nbytes
                left -= item.nbytes
                _keep_status(item.source, place)
        for item in reversed(items):  # after their content, which changes their times
            if item.directory:
                place = os.path.join(target, item.place) if item.place else str(target)
                _keep_status(item.source, place)
    except OSError as error:
        raise translate(error, str(source), "copy") from error
    method: Literal["reflink", "copy", "mixed"] = (
        "copy" if not cloned else "mixed" if written else "reflink"
    )
    return RunCopy(run, method, files, nbytes, written, round(time.monotonic() - begin, 3))


def fingerprint(source: Path) -> Fingerprint:
    """Return what shows whether a file of a checkpoint was written, by place; reads no content.

    Raises:
        NotFoundError, DeniedError, UnsafeError, UnavailableError: it cannot be read.
    """
    try:
        found = {}
        for item in _items(source):
            status = os.lstat(item.source)
            size = 0 if item.directory else status.st_size
            times = (status.st_mtime_ns, status.st_ctime_ns)
            found[item.place or "."] = (size, *times, status.st_ino)
    except OSError as error:
        raise translate(error, str(source), "look at") from error
    return found


def changed(before: Fingerprint, after: Fingerprint) -> list[str]:
    """Return the places that were written, made or removed, those of files first."""
    places = [place for place in {**before, **after} if before.get(place) != after.get(place)]
    return sorted(places, key=lambda place: (any(p.startswith(f"{place}/") for p in places),
                                             place == ".", place))  # fmt: skip


def remove_copy(place: Path) -> None:
    """Remove a copy, even after a training has changed it.

    Raises:
        DeniedError, UnavailableError: it cannot be removed.
    """
    try:
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            with suppress(FileNotFoundError):
                place.unlink()
    except OSError as error:
        raise translate(error, str(place), "remove") from error


def _items(source: Path) -> Iterator[_Item]:
    """Yield the entries of a copy, directories before their content.

    Raises:
        UnsafeError: something is neither file, directory nor link, or links form a circle.
    """
    root = os.path.realpath(source, strict=True)
    yield from _below(root, root, "", ())


def _below(root: str, path: str, place: str, outside: tuple[str, ...]) -> Iterator[_Item]:
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        if not os.path.exists(path):  # a link to nothing leads nowhere in the copy either
            return
        real = os.path.realpath(path, strict=True)
        if real == root or real.startswith(root + os.sep):
            inside = os.path.relpath(real, root)
            yield _Item(place, path, link=os.path.relpath(inside, os.path.dirname(place) or "."))
            return
        if real in outside:
            raise UnsafeError(f"{path} is a link that leads in a circle", kind="special-file")
        path, status, outside = real, os.lstat(real), (*outside, real)
    if stat.S_ISDIR(status.st_mode):
        yield _Item(place, path, directory=True)
        for name in sorted(os.listdir(path)):
            inner = f"{place}/{name}" if place else name
            yield from _below(root, os.path.join(path, name), inner, outside)
    elif stat.S_ISREG(status.st_mode):
        yield _Item(place, path, status.st_size)
    else:
        raise UnsafeError(f"{path} is neither a file nor a directory", kind="special-file")


def _require_free(source: Path, folder: Path, nbytes: int, files: int) -> None:
    system = os.statvfs(folder)
    free = system.f_bavail * system.f_frsize
    if nbytes + _SPARE > free:
        raise NoResourceError(
            f"a restart needs its own copy of {source} ({counted(files, 'file')}, "
            f"{human_bytes(nbytes)}): {folder} needs {human_bytes(nbytes + _SPARE)}, and "
            f"{human_bytes(free)} are free",
            hint="free space, or give a --dir on a filesystem with more room; where it can clone "
            "files (XFS, Btrfs) and holds the checkpoint too, a copy takes none",
        )


def _can_clone(file: str, folder: Path) -> bool:
    probe = os.path.join(folder, f".clone-probe-{os.getpid()}")
    try:
        return _clone(file, probe)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(probe)


def _clone(source: str, target: str) -> bool:
    """Make `target` share the blocks of `source`; False, leaving nothing, if that fails."""
    import fcntl

    with open(source, "rb") as ours, open(target, "xb") as theirs:
        try:
            fcntl.ioctl(theirs.fileno(), _FICLONE, ours.fileno())
        except OSError as error:
            os.unlink(target)
            if error.errno in _CANNOT_CLONE:
                return False
            raise
    return True


def _keep_status(source: str, place: str) -> None:
    """Give a copy its source's times and rights, and its owner the right to write."""
    shutil.copystat(source, place)
    os.chmod(place, stat.S_IMODE(os.stat(place).st_mode) | stat.S_IRUSR | stat.S_IWUSR)
