"""Keep a second sync away from a tier."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from ftckpt.discovery.roots import Root
from ftckpt.errors import UnsupportedError
from ftckpt.retention.locks.claim import beating
from ftckpt.retention.locks.local import lock_beside
from ftckpt.retention.locks.remote import RemoteLock
from ftckpt.storage.local.oserror import translate

FOLDER, FILE = "sync-lock", "sync.lock"


@contextmanager
def locked(tier: Root, actor: str, unlocked: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Hold a tier for one sync, and yield what must be called before each copy.

    A store that cannot keep a second writer away is used without a lock: copies are whole all the
    same, because none overwrites what stands there.

    Args:
        tier: where checkpoints are shipped to.
        actor: who; a second sync is told.
        unlocked: called with the reason when no lock is possible.

    Raises:
        RefusedError: another sync holds it; when the yielded function is called, it was lost.
        UnsafeError: a link stands where the tier's own files belong.
    """
    with ExitStack() as held:
        check = _unchecked
        try:
            check = _lock(tier, actor, held)
        except UnsupportedError as error:
            unlocked(error.message)
        yield check


def _unchecked() -> None:
    """Return: a lock of the system ends with the process, and is never lost before."""


def _lock(tier: Root, actor: str, held: ExitStack) -> Callable[[], None]:
    path = tier.store.local_path(tier.base)
    if path is None:
        lock = RemoteLock(tier, actor, folder=FOLDER, work="sync")
        lock.acquire()
        held.callback(lock.release)
        return held.enter_context(beating(lock.check))
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        held.callback(os.close, folder)
        held.enter_context(lock_beside(folder, tier.url, actor, name=FILE, work="sync"))
    except OSError as error:
        raise translate(error, tier.url, "lock") from error
    return _unchecked
