"""Keep a second guard away from a root, for as long as any process of the command lives."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from ftckpt.discovery.roots import Root
from ftckpt.errors import FtckptError, RefusedError, UnsupportedError
from ftckpt.retention.locks.claim import beating
from ftckpt.retention.locks.local import lock_beside
from ftckpt.retention.locks.remote import RemoteLock
from ftckpt.storage.local.oserror import translate

FOLDER, FILE = "guard-lock", "guard.lock"
# A lease in an object store: the guard of a node that died holds it for this long.
LEASE = 180.0
_AGAIN, _AGAIN_REMOTE = 0.2, 10.0
# By default a new guard waits for longer than a lease.
WAIT = LEASE + 20.0


class Hold(NamedTuple):
    """A root that is held.

    Attributes:
        descriptor: of the lock, for the process that keeps the command; None in an object store.
        check: raises RefusedError once the lease was lost to another guard.
    """

    descriptor: int | None
    check: Callable[[], None]


def _never_lost() -> None:
    """Return: a lock of the system ends with the last process that has it."""


class _Renewal:
    """Renews a lease; a store that is away for a while loses nothing before the lease ends."""

    def __init__(self, lock: RemoteLock) -> None:
        self._lock = lock
        self._until = time.monotonic() + LEASE
        self._lost: RefusedError | None = None

    def beat(self) -> None:
        begun = time.monotonic()
        try:
            self._lock.check()
            self._until = begun + LEASE
        except RefusedError as error:
            self._lost = error
            raise
        except FtckptError as error:
            if time.monotonic() > self._until:
                self._lost = RefusedError(
                    f"the lock could not be renewed for {LEASE:.0f} s: {error.message}",
                    hint="another guard may have begun; start this one again",
                )
                raise self._lost from error

    def check(self) -> None:
        if self._lost is None and time.monotonic() > self._until:  # a beat that does not return
            self._lost = RefusedError(
                f"the lock was not renewed for {LEASE:.0f} s",
                hint="another guard may have begun; start this one again",
            )
        if self._lost is not None:
            raise self._lost


@contextmanager
def held(root: Root, actor: str, *, wait: float, say: Callable[[str], None]) -> Iterator[Hold]:
    """Hold a root for one guard.

    Args:
        root: its `base` is the place that the user named.
        actor: who; a second guard is told.
        wait: seconds to wait for another guard to end: a killed one takes a moment to end its
            command; that of a node that died holds its lease in an object store, or its lock on a
            network filesystem, for some minutes.
        say: is told what is waited for.

    Raises:
        RefusedError: another guard holds it.
        UnsupportedError: the filesystem has no locks, or the store no conditional writes.
        UnsafeError: a link stands where the root's own files belong.
    """
    until = time.monotonic() + wait
    told = False
    while True:
        with ExitStack() as stack:
            try:
                hold = _take(root, actor, stack)
            except RefusedError as error:
                if time.monotonic() >= until:
                    raise
                if not told:
                    say(f"{error.message}; waiting {wait:g} s for it to end")
                    told = True
            else:
                yield hold
                return
        time.sleep(_AGAIN if root.store.traits.local else _AGAIN_REMOTE)


def _take(root: Root, actor: str, stack: ExitStack) -> Hold:
    hint = "--no-lock goes without, where nothing else can start a second guard"
    path = root.store.local_path(root.base)
    try:
        if path is None:
            lock = RemoteLock(root, actor, folder=FOLDER, work="guard", seconds=LEASE)
            lock.acquire()
            stack.callback(lock.release)
            renewal = _Renewal(lock)
            stack.enter_context(beating(renewal.beat, LEASE / 6))
            return Hold(None, renewal.check)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, folder)
        beside = lock_beside(folder, root.url, actor, name=FILE, work="guard")
        return Hold(stack.enter_context(beside), _never_lost)
    except UnsupportedError as error:
        error.hint = f"{error.hint}; {hint}" if error.hint else hint
        raise
    except OSError as error:
        if isinstance(error, FtckptError):
            raise
        raise translate(error, root.url, "lock") from error
