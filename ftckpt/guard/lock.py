"""Keep a second guard away from a root, for as long as any process of the command lives."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from ftckpt.discovery.roots import Root
from ftckpt.errors import FtckptError, RefusedError, UnsupportedError
from ftckpt.retention.locks.local import lock_beside
from ftckpt.retention.locks.remote import RemoteLock, beating
from ftckpt.storage.local.oserror import translate

from .journal import of_place

FOLDER, FILE = "guard-lock", "guard.lock"
# A lease in an object store: the guard of a node that died holds it for this long.
LEASE = 180.0
_AGAIN, _AGAIN_REMOTE = 0.2, 10.0
# By default a new guard waits for longer than a lease.
WAIT = LEASE + 20.0


class Hold(NamedTuple):
    """A root that is held.

    Attributes:
        descriptors: of the locks, for the process that keeps the command; none in an object store.
        check: raises RefusedError once a lease was lost to another guard.
        also: holds the directory below that the steps lie in, once there is one.
    """

    descriptors: Sequence[int] = ()
    check: Callable[[], None] = lambda: None
    also: Callable[[Root], None] = lambda _: None


class _Held:
    """The places of one root that a guard holds: what the user named, and where its steps lie.

    Another guard may name that one, so that both must be held.
    """

    def __init__(self, actor: str, stack: ExitStack) -> None:
        self._actor, self._stack = actor, stack
        self._checks: list[Callable[[], None]] = []
        self._bases: set[str] = set()
        self._refused: FtckptError | None = None
        self._changing = threading.Lock()
        self.descriptors: list[int] = []

    def take(self, root: Root) -> None:
        """Hold a place.

        Raises:
            FtckptError: as of `held`.
        """
        if root.base in self._bases:
            return
        descriptor, check = _take(root, self._actor, self._stack)
        self._bases.add(root.base)
        if descriptor is not None:
            self.descriptors.append(descriptor)
        if check is not None:
            self._checks.append(check)

    def also(self, root: Root) -> None:
        """Hold a place that has come; `check` tells whether another guard has it."""
        with self._changing:
            try:
                self.take(root)
            except RefusedError as error:
                self._refused = error
            except FtckptError:
                return  # asked again at the next look

    def check(self) -> None:
        if self._refused is not None:
            raise self._refused
        for check in list(self._checks):
            check()


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
        root: with the directory that its steps lie in, which is held too.
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
                places = _Held(actor, stack)
                for one in (of_place(root), root):
                    places.take(one)
            except RefusedError as error:
                if time.monotonic() >= until:
                    raise
                if not told:
                    say(f"{error.message}; waiting {wait:g} s for it to end")
                    told = True
            else:
                yield Hold(places.descriptors, places.check, places.also)
                return
        time.sleep(_AGAIN if root.store.traits.local else _AGAIN_REMOTE)


def _take(root: Root, actor: str, stack: ExitStack) -> tuple[int | None, Callable[[], None] | None]:
    """Hold one place; return the lock's descriptor, or what says that a lease was lost."""
    hint = "--no-lock goes without, where nothing else can start a second guard"
    path = root.store.local_path(root.base)
    try:
        if path is None:
            lock = RemoteLock(root, actor, folder=FOLDER, work="guard", seconds=LEASE)
            lock.acquire()
            stack.callback(lock.release)
            renewal = _Renewal(lock)
            stack.enter_context(beating(renewal.beat, LEASE / 6))
            return None, renewal.check
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, folder)
        beside = lock_beside(folder, root.url, actor, name=FILE, work="guard")
        return stack.enter_context(beside), None
    except UnsupportedError as error:
        error.hint = f"{error.hint}; {hint}" if error.hint else hint
        raise
    except OSError as error:
        if isinstance(error, FtckptError):
            raise
        raise translate(error, root.url, "lock") from error
