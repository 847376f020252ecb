"""Hold a lease on a root in an object store for the one gc that changes it.

    .ftckpt/lock/7.json      who holds it, for how long, and a unique token

A lease is taken by creating the next number; only one of several writers succeeds. It expires, so a
killed holder blocks nobody for long, and is renewed by writing it again. The store's own clock
measures its age: a probe is written to read it, so the clocks of competing machines do not matter.
A holder that was paused for longer than the lease finds another number there, or none, and stops.

A store that lets a second writer have the same number cannot exclude anybody and is refused. One
that refuses the second but lets several win a race (OpenStack Swift) is safe: the last of them
stands, and the others find its token before they change anything.

Claim an entry of a root for as long as a body of code works with it.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ftckpt.discovery.roots import Root
from ftckpt.errors import (
    CorruptError,
    ExistsError,
    FtckptError,
    NotFoundError,
    RefusedError,
    UnsupportedError,
)
from ftckpt.own_files import TEMPORARY, is_leftover
from ftckpt.retention.records import own_folder
from ftckpt.retention.scan.entries import Lease
from ftckpt.storage.store import Entry
from ftckpt.strict_json import decode

from . import leases
from .leases import LONGEST

FOLDER = "lock"
SCHEMA = "ftckpt.lock/1"
# Long enough for one step with all its retries, short enough for the next hourly cron run.
LEASE = 600.0

# Of any length: a lease whose number were too long to be seen would exclude nobody.
_NUMBERED = re.compile(r"([0-9]+)\.json")
_MAX_BYTES = 64 << 10
# Most stores keep times of objects in whole seconds, rounded in different ways.
_ROUNDING = 2.0
# A probe of this age has no owner any more.
_LEFT_BEHIND = 3600.0


class _Standing(NamedTuple):
    """An existing lease, expired or not."""

    number: int
    entry: Entry
    holder: str
    left: float


class RemoteLock:
    """A lease on one root, by conditional writes.

    Args:
        root: the root.
        actor: shown to others who find it taken.
        folder: below the root's `.ftckpt`; one for each kind of work.
        work: the word for that work in messages.
        seconds: duration of a lease, at most half an hour.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        root: Root,
        actor: str,
        *,
        folder: str = FOLDER,
        work: str = "gc",
        seconds: float = LEASE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._store = root.store
        self._folder = f"{own_folder(root)}/{folder}"
        self._work = work
        self._seconds = seconds
        self._clock = clock
        self._number = 0
        self._until = 0.0
        record = {
            "schema": SCHEMA,
            "holder": actor,
            "token": secrets.token_hex(16),
            "seconds": seconds,
        }
        self._record = json.dumps(record).encode() + b"\n"

    def acquire(self) -> None:
        """Take the lease.

        Raises:
            RefusedError: another holds it.
            UnsupportedError: the store cannot exclude a second writer; nothing was changed.
            DeniedError, UnavailableError: the storage refused.
        """
        now = self._probe()
        standing = self._standing(now)
        self._refuse_live(standing)
        number = max((s.number for s in standing), default=0) + 1
        until = self._clock() + self._seconds
        try:
            self._store.create(self._path(number), self._record)
        except ExistsError as error:
            raise self._taken("") from error
        self._number, self._until = number, until
        try:
            # Two writers that saw different numbers, because a third left between, see each other
            # here.
            self._refuse_live([s for s in self._standing(now) if s.number != number])
            self.check()
        except BaseException:
            self.release()
            raise
        self._store.delete([s.entry.path for s in standing])

    def check(self) -> None:
        """Check before a change that the lease is still ours; renew it in time.

        An expired lease that nobody has taken is taken again.

        Raises:
            RefusedError: another has taken it; change nothing more.
        """
        self._require_mine()
        now = self._clock()
        if self._until - now < self._seconds * 2 / 3:
            ended = now >= self._until
            self._store.put(self._path(self._number), self._record)
            self._until = now + self._seconds
            if ended:
                # A writer that took it between the look and the put is visible now, or finds this
                # one.
                self._require_mine()

    def release(self) -> None:
        """Give the lease back; if that fails, it expires."""
        number, self._number = self._number, 0
        if number and self._is_mine(number):
            self._store.delete([self._path(number)])

    def _probe(self) -> float:
        """Return the store's time; test whether it refuses a second writer."""
        # Its name is one that the store's own probes (`stores.s3write`) do not sweep away.
        probe = f"{self._folder}/{TEMPORARY}clock-{secrets.token_hex(8)}"
        self._store.create(probe, b"")
        try:
            now = self._store.stat(probe).mtime
        finally:
            outcome = self._store.delete([probe])[probe]
        if outcome is not None:  # without permission to delete, do not begin
            raise outcome
        if not self._store.traits.conditional_put or now is None:
            lacks = "keeps no times" if now is None else "ignores conditions"
            raise UnsupportedError(
                f"{self._root.url} cannot be locked: the store {lacks}, so two runs would not see "
                "each other",
                hint="a store with conditional writes is needed (PUT with If-None-Match)",
            )
        return now

    def _standing(self, now: float) -> list[_Standing]:
        found = []
        for entry in self._listed():
            match = _NUMBERED.fullmatch(entry.path[len(self._folder) + 1 :])
            if match is not None:
                found.append(self._read(int(match[1]), entry, now))
            elif is_leftover(entry.path) and entry.mtime and now - entry.mtime > _LEFT_BEHIND:
                self._store.delete([entry.path])
        return found

    def _read(self, number: int, entry: Entry, now: float) -> _Standing:
        """Return a lease; a damaged one counts for the longest duration."""
        holder, seconds = "", LONGEST
        try:
            said = decode(self._store.read(entry.path, 0, min(entry.size, _MAX_BYTES)))
            holder, seconds = str(said["holder"]), float(said["seconds"])
        except NotFoundError:
            return _Standing(number, entry, "", 0.0)  # given back since it was listed
        except (CorruptError, ValueError, TypeError, KeyError, OverflowError):
            holder = ""
        if not 0 < seconds <= LONGEST:
            seconds = LONGEST
        left = seconds if entry.mtime is None else entry.mtime + seconds + _ROUNDING - now
        return _Standing(number, entry, holder, left)

    def _refuse_live(self, standing: list[_Standing]) -> None:
        for lease in standing:
            if lease.left > 0:
                raise self._taken(f": {lease.holder}" if lease.holder else "", lease.left)

    def _listed(self) -> list[Entry]:
        try:
            return self._store.children(self._folder)
        except NotFoundError:
            return []

    def _require_mine(self) -> None:
        names = (entry.path[len(self._folder) + 1 :] for entry in self._listed())
        numbers = (int(m[1]) for m in map(_NUMBERED.fullmatch, names) if m is not None)
        if not self._is_mine(self._number) or any(n > self._number for n in numbers):
            raise RefusedError(
                f"the lock of {self._root.url} was lost: another {self._work} has taken it",
                hint="what was done is done, and nothing half: run it again",
            )

    def _is_mine(self, number: int) -> bool:
        try:
            return self._store.read(self._path(number), 0, len(self._record)) == self._record
        except (NotFoundError, CorruptError):
            return False

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number}.json"

    def _taken(self, who: str, left: float = 0.0) -> RefusedError:
        waiting = f"; should that one have been killed, it ends in {left:.0f} s" if left else ""
        return RefusedError(
            f"another {self._work} is at work on {self._root.url}{who}",
            hint=f"wait for it{waiting}",
        )


# A lease is prolonged when a third of it has passed, so that two late beats do not lose it.
_BEAT = LEASE / 4


@contextmanager
def leased(
    root: Root, entry: str, holder: str, now: Callable[[], float] = time.time
) -> Iterator[None]:
    """Claim an entry, so that gc leaves it alone meanwhile.

    A root that may not be written goes without: what gc takes away meanwhile is named then.
    """

    def take() -> None:
        leases.take(root, entry, holder=holder, now=now())

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
