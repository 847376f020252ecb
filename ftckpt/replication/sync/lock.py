"""Keep a second sync away from a tier, and gc away from the checkpoint that is being shipped."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from ftckpt.discovery.roots import Root
from ftckpt.errors import FtckptError, UnsupportedError
from ftckpt.retention.locks import leases
from ftckpt.retention.locks.local import lock_beside
from ftckpt.retention.locks.remote import LEASE, RemoteLock
from ftckpt.retention.scan.entries import Lease
from ftckpt.storage.local.oserror import translate

FOLDER, FILE = "sync-lock", "sync.lock"
# A lease is prolonged when a third of it has passed, so that two late beats do not lose it.
_BEAT = LEASE / 4


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


@contextmanager
def leased(root: Root, entry: str, holder: str) -> Iterator[None]:
    """Claim an entry of the source, so that gc there waits until it is shipped.

    A root that may not be written goes without: what gc takes away meanwhile is named then.
    """

    def take() -> None:
        leases.take(root, entry, holder=holder, now=time.time())

    try:
        take()
    except FtckptError:
        yield
        return
    try:
        with beating(take):
            yield
    finally:
        with suppress(FtckptError):
            leases.release(root, Lease(entry, holder, 0.0))


@contextmanager
def beating(beat: Callable[[], None], seconds: float = _BEAT) -> Iterator[Callable[[], None]]:
    """Call `beat` now and then while the body runs; yield what raises the failure of one.

    Args:
        beat: may raise FtckptError, and is not called again then.
        seconds: between two calls.
    """
    failed: list[FtckptError] = []
    ended = threading.Event()

    def run() -> None:
        while not failed and not ended.wait(seconds):
            try:
                beat()
            except FtckptError as error:
                failed.append(error)

    def check() -> None:
        if failed:
            raise failed[0]
        beat()

    thread = threading.Thread(target=run, name="ftckpt-lease", daemon=True)
    thread.start()
    try:
        yield check
    finally:
        ended.set()
        thread.join()
