"""What a local directory can do, tried in a hidden folder of our own that goes again.

A run that is killed leaves its folder. The lock in it ends with the process, so that the next run
knows by it which folders are left, and removes them.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress

from ftckpt.amounts import human_bytes, human_duration
from ftckpt.errors import FtckptError, NotFoundError, UnsupportedError, UsageError
from ftckpt.own_files import TEMPORARY
from ftckpt.storage.local import folders, pagecache
from ftckpt.storage.local.atomic import sync_directory
from ftckpt.storage.local.folders import FLAGS, Removal, exchange
from ftckpt.storage.local.oserror import claim, translate

from .machine import Check, State

_FOLDER = f"{TEMPORARY}doctor-"
_LOCK = "lock"
_OLD = 3600.0  # a folder without a lock of its own is left when nothing wrote to it for so long
_SKEW = 2.0
_FULL = 0.05
_FEW_INODES = 10_000
READING = "inspect, verify, latest, status, diff, delta info and copies from here"
WRITING = "seal, promote, pin, tag, gc, repair, sync and every verb that writes a checkpoint here"


def examine_directory(path: str) -> Iterator[Check]:
    """Yield what a directory can do.

    Raises:
        NotFoundError: it does not exist.
        UsageError: it is a file.
        DeniedError, UnavailableError: it cannot be listed.
    """
    try:
        names = os.listdir(path)
        held = os.stat(path)
        system = os.statvfs(path)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist", hint="make it, or mount it") from error
    except NotADirectoryError as error:
        raise UsageError(f"{path} is a file", hint="name the root, a directory") from error
    except OSError as error:
        raise translate(error, path, "list") from error
    yield _filesystem(path)
    yield _reading(path, names)
    yield from _room(system)
    yield from _sticky(held)
    left = _remove_left(path, names)
    if left:
        yield Check(
            "place", "left by a killed doctor", State.NOTE, f"{left} removed", "nothing is left"
        )
    yield from _tried(path)


def _reading(path: str, names: list[str]) -> Check:
    """Return whether what lies in the directory may be read too, as far as a look at each tells."""
    shut = []
    for name in sorted(names):
        one = os.path.join(path, name)
        needed = os.R_OK | (os.X_OK if os.path.isdir(one) else 0)
        if os.path.exists(one) and not os.access(one, needed):
            shut.append(name)
    if not shut:
        return Check("place", "reading", State.OK, "allowed", READING)
    more = f" (and {len(shut) - 1} more)" if len(shut) > 1 else ""
    return Check(
        "place", "reading", State.PROBLEM, f"refused: {shut[0]}{more}",
        f"these fail there: {READING}",
        "run them as the owner, or let a group of yours read it",
    )  # fmt: skip


def _tried(path: str) -> Iterator[Check]:
    """Yield what takes a folder of our own to be known."""
    folder = os.path.join(path, _FOLDER + secrets.token_hex(8))
    try:
        os.mkdir(folder)
    except OSError as error:
        refused = translate(error, path, "write in")
        yield Check(
            "place", "writing", State.NOTE, f"refused: {error.strerror}",
            f"these fail here: {WRITING}",
            refused.hint or "run them as the owner, or on a machine that mounts it for writing",
        )  # fmt: skip
        return
    lock = -1
    try:
        lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        yield Check("place", "writing", State.OK, "allowed", WRITING)
        yield _locks(folder, lock)
        yield _hard_links(folder)
        yield from _renames(folder)
        yield from _names(folder)
        yield _clock(folder)
        yield _page_cache(folder)
    except OSError as error:
        refused = translate(error, path, "write in")
        yield Check(
            "place", "trying it out", State.PROBLEM, str(error.strerror), refused.message,
            refused.hint,
        )  # fmt: skip
    finally:
        if lock >= 0:
            os.close(lock)
        _remove(path, os.path.basename(folder))


def _remove(path: str, name: str) -> bool:
    """Remove a folder of ours; say whether it is gone."""
    here = os.open(path, FLAGS & ~os.O_NOFOLLOW)
    try:
        removal = Removal()
        removal.remove(name, here, os.path.join(path, name))
        return not removal.failed
    except FtckptError:
        return False
    finally:
        os.close(here)


def _remove_left(path: str, names: list[str]) -> int:
    """Remove what killed runs left; return how many folders."""
    removed = 0
    for name in names:
        if not name.startswith(_FOLDER):
            continue
        folder = os.path.join(path, name)
        with suppress(OSError, FtckptError):
            try:
                lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_NOFOLLOW)
            except FileNotFoundError:  # killed before, or just begun
                if time.time() - os.lstat(folder).st_mtime > _OLD:
                    removed += _remove(path, name)
                continue
            try:
                claim(lock, folder)
                removed += _remove(path, name)
            except UnsupportedError:
                if time.time() - os.fstat(lock).st_mtime > _OLD:
                    removed += _remove(path, name)
            finally:
                os.close(lock)
    return removed


def _filesystem(path: str) -> Check:
    found, options = "", ""
    real = os.path.realpath(path)
    with suppress(OSError), open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
        longest = -1
        for line in mounts:
            _, place, kind, flags, *_ = line.split()
            place = place.replace("\\040", " ")
            inside = real == place or real.startswith(place.rstrip("/") + "/")
            if inside and len(place) >= longest:
                longest, found, options = len(place), kind, flags
    if not found:
        return Check("place", "filesystem", State.UNKNOWN, "not told", "what follows was tried")
    if "ro" in options.split(","):
        found += ", mounted read-only"
    memory = found.startswith(("tmpfs", "ramfs"))
    means = "its files are lost with the machine" if memory else "what follows was tried on it"
    do = "sync to another tier" if memory else ""
    return Check("place", "filesystem", State.NOTE if memory else State.OK, found, means, do)


def _room(system: os.statvfs_result) -> Iterator[Check]:
    free, total = system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize
    full = bool(total) and free < _FULL * total
    yield Check(
        "place", "free space", State.PROBLEM if full else State.OK,
        f"{human_bytes(free)} of {human_bytes(total)}",
        "a save that finds no room is lost" if full else "what reshard and copies may take",
        "ftckpt gc ROOT shows what could be dropped" if full else "",
    )  # fmt: skip
    if system.f_files:
        few = system.f_favail < _FEW_INODES
        yield Check(
            "place", "free inodes", State.PROBLEM if few else State.OK, f"{system.f_favail:,}",
            "each file takes one", "remove small files, or ask for a larger quota" if few else "",
        )  # fmt: skip


def _sticky(held: os.stat_result) -> Iterator[Check]:
    if held.st_mode & stat.S_ISVTX and os.geteuid() not in (0, held.st_uid):
        yield Check(
            "place", "sticky bit", State.NOTE, "set", "gc moves your own checkpoints alone",
            "run gc as the owner of the directory",
        )  # fmt: skip


def _locks(folder: str, lock: int) -> Check:
    means = "gc, sync and transfers see each other"
    try:
        claim(lock, folder)
        other = os.open(os.path.join(folder, _LOCK), os.O_RDWR)
        try:
            claim(other, folder)
        except BlockingIOError:
            return Check("place", "locks", State.OK, "hold", means)
        finally:
            os.close(other)
        return Check(
            "place", "locks", State.PROBLEM, "held by two at once",
            "two gc, sync or transfers do not see each other",
            "run one at a time, or mount it with locks",
        )  # fmt: skip
    except UnsupportedError as error:
        return Check(
            "place", "locks", State.PROBLEM, "none", "gc --apply and transfers end with 13 here",
            error.hint,
        )  # fmt: skip


def _hard_links(folder: str) -> Check:
    one, two = os.path.join(folder, "one"), os.path.join(folder, "two")
    with open(one, "wb"):
        pass
    try:
        os.link(one, two)
        linked = os.path.samefile(one, two)
    except OSError:
        linked = False
    if linked:
        return Check("place", "hard links", State.OK, "work", "a new name never replaces another")
    return Check(
        "place", "hard links", State.PROBLEM, "none",
        "seal, pin and transfers end with 13 here",
        "write to another filesystem",
    )  # fmt: skip


def _renames(folder: str) -> Iterator[Check]:
    here = os.open(folder, FLAGS)
    try:
        for name in ("old", "new"):
            with open(os.path.join(folder, name), "wb") as file:
                file.write(name.encode())
        os.rename("new", "old", src_dir_fd=here, dst_dir_fd=here)
        with open(os.path.join(folder, "old"), "rb") as file:
            replaced = file.read() == b"new"
        sync_directory(folder)
        yield Check(
            "place", "rename", State.OK if replaced else State.PROBLEM,
            "replaces in one act" if replaced else "lost what it renamed",
            "pointers and checkpoints become visible whole",
            "" if replaced else "do not use this filesystem for checkpoints",
        )  # fmt: skip
        for name in ("a", "b"):
            os.mkdir(name, dir_fd=here)
        refused = folders.renameat2(here, "a", here, "b") == errno.EEXIST
        try:
            exchange(os.path.join(folder, "a"), os.path.join(folder, "b"))
            swapped = True
        except UnsupportedError:
            swapped = False
        both = refused and swapped
        yield Check(
            "place", "rename without replacing", State.OK if both else State.NOTE,
            "yes, and swaps two names" if both else "no" if not refused else "no swap of two names",
            "repair swaps a mended checkpoint in without a gap" if both
            else "two runs that make one name within a millisecond are not told apart, and repair "
            "ends with 13" if not refused else "repair ends with 13",
            "" if both else "repair into another place (copy), and point the root at it",
        )  # fmt: skip
    finally:
        os.close(here)


def _names(folder: str) -> Iterator[Check]:
    with open(os.path.join(folder, "Case"), "wb"):
        pass
    alike = os.path.lexists(os.path.join(folder, "cASE"))
    yield Check(
        "place", "case", State.NOTE if alike else State.OK,
        "not told apart" if alike else "told apart",
        "names that differ in case alone are one file" if alike else "every name is one file",
        "rename such files before they are copied here" if alike else "",
    )  # fmt: skip


def _clock(folder: str) -> Check:
    before = time.time()
    path = os.path.join(folder, "now")
    with open(path, "wb") as file:
        file.write(b"0")
        os.fsync(file.fileno())
    apart = os.stat(path).st_mtime
    after = time.time()
    skew = max(before - apart, apart - after, 0.0)
    if skew <= _SKEW:
        return Check("place", "clock", State.OK, "as ours", "ages of checkpoints are right")
    side = "behind" if apart < before else "ahead"
    return Check(
        "place", "clock", State.PROBLEM, f"{human_duration(skew)} {side} of ours",
        "ages are wrong by that: gc, status and latest --newer-than follow them",
        "set both clocks (NTP)",
    )  # fmt: skip


def _page_cache(folder: str) -> Check:
    path = os.path.join(folder, "pages")
    with open(path, "wb") as file:
        file.write(bytes(2 * pagecache.SMALL))
        os.fsync(file.fileno())
    fd = os.open(path, os.O_RDONLY)
    try:
        if pagecache.in_memory(fd):
            found, kept = "is the storage", True
        elif pagecache.reads_uncached(fd):
            found, kept = "left as it was (RWF_DONTCACHE)", True
        elif pagecache.is_cached(fd, 0, pagecache.SMALL):
            found, kept = "left as it was (cachestat)", True
        else:
            found, kept = "left as it was where mincore tells", False
    finally:
        os.close(fd)
    return Check(
        "place", "page cache", State.OK if kept else State.NOTE, found,
        "a verify takes nothing of a trainer's cache" if kept
        else "a verify may be slower, or take some of a trainer's cache",
        "" if kept else "Linux 6.5 or later tells what is cached",
    )  # fmt: skip
