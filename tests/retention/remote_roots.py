"""Roots in object stores, for trying what goes on there."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ftckpt.discovery import resolve as opening
from ftckpt.discovery.candidates import Walk
from ftckpt.discovery.resolve import Place
from ftckpt.errors import FtckptError
from ftckpt.retention.apply.prepare import Prepared, prepare
from ftckpt.retention.policy import Policy
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.store import Entry, Store
from tests.builders.small_format import MARKER, Small

NOW = 1_800_000_000.0
HOUR, DAY = 3600.0, 86400.0
KEEP_2 = Policy(keep_last=2)

_numbers = itertools.count()


class TimedStore(MemoryStore):
    """A memory whose clock the test sets; it is the store's own, which no machine shares."""

    def __init__(self, url: str = "") -> None:
        super().__init__(url or f"memory://timed-{next(_numbers)}")
        self.now = NOW
        self.times: dict[str, float] = {}

    def stat(self, path: str) -> Entry:
        return self._timed(super().stat(path))

    def walk(self, path: str = "") -> list[Entry]:
        return [self._timed(entry) for entry in super().walk(path)]

    def _store(self, key: str, data: bytes) -> None:
        self.times[key] = self.now
        super()._store(key, data)

    def _timed(self, entry: Entry) -> Entry:
        found = self._space.objects.get(entry.path)
        if found is None:
            return entry
        # As S3 does it: the same bytes have the same ETag again.
        etag = hashlib.md5(found.data, usedforsecurity=False).hexdigest()
        return entry._replace(mtime=self.times[entry.path], etag=etag)


class Died(BaseException):
    """A process was killed."""


class Mortal(TimedStore):
    """A store whose process is killed at its n-th change: from then on nothing of it arrives."""

    def __init__(self, other: TimedStore, left: int) -> None:
        super().__init__(other.url)
        self.times, self.now = other.times, other.now
        self.left = left

    def _store(self, key: str, data: bytes) -> None:
        self._change()
        super()._store(key, data)

    def delete(self, paths: Sequence[str]) -> Mapping[str, FtckptError | None]:
        found: dict[str, FtckptError | None] = {}
        for path in paths:  # a batch that is cut off has taken some of its keys
            self._change()
            found |= super().delete([path])
        return found

    def _change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Died


def kill_points(
    make: Callable[[], TimedStore], work: Callable[[TimedStore], Any], limit: int = 500
) -> Iterator[TimedStore]:
    """Run `work` on a new store that dies at change 1, 2, 3 …; yield each, until it is done.

    The clock of a store that is yielded stands after the end of any lease.
    """
    for point in range(limit):
        store = make()
        try:
            work(Mortal(store, point))
        except Died:
            store.now += 700
            yield store
        else:
            return
    raise AssertionError(f"it was not done after {limit} changes")


def save(store: Store, name: str, step: int, state: str = "good") -> None:
    """Write a checkpoint: data, and then its marker."""
    store.put(f"{name}/data", b"%d" % step * 50)
    store.put(f"{name}/deep/data", b"%d" % step * 20)
    store.put(f"{name}/{MARKER}", b'{"step": %d, "state": "%s"}' % (step, state.encode()))


def saves(store: TimedStore, steps: Sequence[int], base: str = "") -> None:
    """Write checkpoints an hour apart, the last a day before now."""
    for number, step in enumerate(steps):
        store.now = NOW - DAY - HOUR * (len(steps) - number)
        save(store, f"{base}step-{step}", step)
    store.now = NOW


def place_of(store: Store) -> Place:
    """Return the place that a store is opened at."""
    return Place(store.url, store, store.stat("")._replace(path=""))


def planned(store: Store, policy: Policy = KEEP_2, *, now: float = NOW, **more: Any) -> Prepared:
    return prepare(place_of(store), [Small()], policy, now, **more)


def newest(store: Store) -> str | None:
    """Return the name of what a restart would take."""
    root = opening.open_root(place_of(store), [Small()])
    found = (looked for looked in Walk(root).newest_first() if looked.error is None)
    return next((looked.candidate.path for looked in found), None)


def names(store: Store) -> set[str]:
    """Return the names in a root, ftckpt's own left out."""
    return {e.path.split("/")[0] for e in store.walk("")} - {".ftckpt"}


def keys(store: Store) -> list[str]:
    """Return all keys but those of the log."""
    return [e.path for e in store.walk("") if ".ftckpt/log/" not in e.path]
