"""Answers that came too late for one TAB, kept for the next ones.

One file an answer, in a directory that only the user may read. While one child looks for an answer
no other does.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

# Answers that are older are not given any more, and files that are older are removed.
_SECONDS = 60.0
_STALE = 86_400.0


def folder() -> str:
    """Return where the answers are kept."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = home if os.path.isabs(home) else os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "ftckpt", "completions")


def remembered(key: Sequence[object], deadline: float, look: Callable[[], list[str]]) -> list[str]:
    """Return what `look` finds, or has found within the last minute and too late.

    Args:
        key: what tells this answer from others.
        deadline: after it the answer is kept, by the monotonic clock.
        look: finds the answer.

    Raises:
        BlockingIOError: another child looks for this answer now.
    """
    environment = sorted(item for item in os.environ.items() if item[0].startswith("AWS_"))
    name = hashlib.sha256(json.dumps([list(key), environment], default=str).encode()).hexdigest()
    place = folder()
    try:
        os.makedirs(place, mode=0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(os.path.join(place, name), flags, 0o600)
    except OSError:  # no home, or a full one
        return look()
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another child is at it, and this one has nothing to say
        raise
    except OSError:  # a filesystem without locks
        return look()
    kept = _kept(file)
    if kept is not None:
        return kept
    found = look()
    if time.monotonic() > deadline:
        data = json.dumps(found).encode()
        with suppress(OSError):
            os.ftruncate(file, 0)
            os.pwrite(file, data, 0)
        _tidy(place)
    else:
        with suppress(OSError):
            os.unlink(os.path.join(place, name))
    return found


def _kept(file: int) -> list[str] | None:
    """Return the answer of a file if it is one, and young."""
    there = os.fstat(file)
    if not there.st_size or not -1 < time.time() - there.st_mtime < _SECONDS:
        return None
    try:
        found = json.loads(os.pread(file, there.st_size, 0))
    except ValueError:
        return None
    is_answer = isinstance(found, list) and all(isinstance(one, str) for one in found)
    return found if is_answer else None


def _tidy(place: str) -> None:
    now = time.time()
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if now - entry.stat(follow_symlinks=False).st_mtime > _STALE:
                os.unlink(entry.path)
