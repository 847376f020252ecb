"""Write a local file atomically and durably.

The bytes go to a hidden temporary name in the same directory and are flushed there; one rename (to
replace) or one link (to create) makes them visible; then the directory is flushed. A killed writer
leaves at most the temporary name behind, which `is_leftover` recognises.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from ftckpt.errors import ExistsError, UnsafeError, UnsupportedError
from ftckpt.own_files import FOLDER, TEMPORARY

from .oserror import translate
from .ownership import give, make_folder


def write_over(path: str, data: bytes, *, parents: bool = True, mark: str = "") -> None:
    """Put `data` under `path`, replacing an existing file or link.

    With `parents` it makes missing directories; `mark` begins the temporary name, so that who holds
    a lock knows what a killed run of its own has left.

    Raises:
        NotFoundError: the directory is missing, without `parents`.
        DeniedError, NoResourceError, UnavailableError: the system refused.
    """
    _write(path, data, os.rename, parents, mark)


def write_new(path: str, data: bytes, *, parents: bool = True, mark: str = "") -> None:
    """Put `data` under `path`, which must not exist, not even as a dangling link.

    `parents` and `mark` are as in `write_over`.

    Raises:
        ExistsError: the name is taken.
        NotFoundError: the directory is missing, without `parents`.
        UnsupportedError: the filesystem has no hard links, so two writers cannot be told apart.
        DeniedError, NoResourceError, UnavailableError: the system refused.
    """
    _write(path, data, _link, parents, mark)


def _write(
    path: str, data: bytes, publish: Callable[[str, str], None], parents: bool, mark: str
) -> None:
    import secrets  # its import takes longer than reading a small checkpoint

    require_own(path)
    directory = os.path.dirname(path) or "."
    temporary = os.path.join(directory, TEMPORARY + mark + secrets.token_hex(8))
    try:
        if parents:
            make_directories(directory)
        _write_durably(temporary, data)
        try:
            publish(temporary, path)
        except BaseException:
            _remove(temporary)
            raise
        sync_directory(directory)
    except OSError as error:
        if isinstance(error, ExistsError):
            raise
        raise translate(error, path, "write") from error


def require_own(path: str) -> None:
    """Refuse to change anything where a link stands in place of our folder, or of one in it.

    Raises:
        UnsafeError: it is a link: who may write the root chose where that would be.
    """
    before, own, below = path.rpartition(f"/{FOLDER}/")
    if not own:
        return
    place = f"{before}/{FOLDER}"
    for name in ("", *below.split("/")[:-1]):
        place = f"{place}/{name}" if name else place
        if os.path.islink(place):
            raise UnsafeError(
                f"{place} is a link: it was not made by ftckpt",
                kind="special-file",
                file=f"{FOLDER}/{name}".rstrip("/"),
            )


def link_new(made: str, path: str) -> None:
    """Give a whole file a second name that must not exist, not even as a dangling link.

    Raises:
        ExistsError: the name is taken.
        UnsupportedError: the filesystem has no hard links.
        OSError: the system refused.
    """
    try:
        os.link(made, path, follow_symlinks=False)
    except FileExistsError:
        # NFS repeats a request whose answer was lost, and then reports our own link as another's.
        if not os.path.samestat(os.lstat(made), os.lstat(path)):
            raise ExistsError(f"{path} exists already") from None
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS) and os.access(
            os.path.dirname(path) or ".", os.W_OK
        ):
            raise UnsupportedError(
                f"cannot create {path}: the filesystem has no hard links"
            ) from error
        raise


def _link(temporary: str, path: str) -> None:
    link_new(temporary, path)
    _remove(temporary)


def _write_durably(path: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o666)
    try:
        give(fd, os.stat(os.path.dirname(path) or "."))
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    except BaseException:
        os.close(fd)
        _remove(path)
        raise
    # close reports what a network filesystem could not write back
    os.close(fd)


def make_directories(directory: str) -> None:
    """Create missing directories and flush each into its parent."""
    if os.path.isdir(directory):
        return
    parent = os.path.dirname(directory) or "."
    make_directories(parent)
    try:
        make_folder(directory)
    except FileExistsError:
        if not os.path.isdir(directory):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        return
    sync_directory(parent)


def sync_directory(directory: str) -> None:
    """Flush a directory's names to the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_open_directory(fd)
    finally:
        os.close(fd)


def sync_open_directory(fd: int) -> None:
    """Flush an open directory's names to the disk."""
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network filesystems cannot flush a directory; their rename is durable by itself.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # it stays as a recognisable leftover; the original error matters more
