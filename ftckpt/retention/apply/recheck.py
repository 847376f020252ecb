"""Reread a root while entries are dropped: new entries, and claims on the next one.

A root can have ten thousand names, and each may be the next that goes. So before each its names are
listed, and nothing is asked about those that were there but for links and pointers, which can come
to mean another one, and for saves that were not finished.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from ftckpt.discovery.roots import Candidate, Root, read_again
from ftckpt.errors import NotFoundError
from ftckpt.own_files import FOLDER
from ftckpt.retention.scan.classify import classify
from ftckpt.retention.scan.entries import EntryClass, RootEntry
from ftckpt.retention.scan.entry import ScannedEntry, ScanOptions
from ftckpt.retention.scan.evidence import EntryHolds
from ftckpt.storage.local.oserror import translate, twice
from ftckpt.storage.overlay import OverlayStore
from ftckpt.storage.store import Entry, EntryKind, Store, join

# What is of one of these classes stays so until somebody changes it.
_SETTLED = (EntryClass.COMMITTED, EntryClass.CORRUPT)


class Watch:
    """One root, looked at again and again.

    Args:
        root: as it was read; what has come since is news.
        how: to read what comes.
        unfinished: names (`RootEntry.name`) of saves that may be finished by now.

    Raises:
        NotFoundError: the root is gone.
        UnavailableError, DeniedError: it could not be listed.
    """

    def __init__(self, root: Root, how: ScanOptions, unfinished: Container[str]) -> None:
        self._root = root
        self._how = how
        self._candidates = {c.path: c for c in root.candidates}
        self._of_step: dict[int | None, dict[str, Candidate]] = defaultdict(dict)
        for candidate in root.candidates:
            self._of_step[candidate.step][candidate.path] = candidate
        self._pointing = {p.name for p in root.pointers}
        self._names = {*self._candidates, *root.foreign, *self._pointing}
        self._pointing |= self._links(root.store.children(root.base))
        self._unsettled = [c for c in root.candidates if c.entry.path in unfinished]

    def look(self, found: ScannedEntry, now: float) -> tuple[RootEntry, list[ScannedEntry]]:
        """Return an entry with who claims it at this moment; and what has come, or was unfinished.

        Args:
            found: an entry of the root.
            now: seconds since the epoch.

        Raises:
            NotFoundError: the root is gone.
            UnavailableError, DeniedError: something could not be read; nothing is concluded then.
            UnsafeError: the root's `.ftckpt` is a link.
        """
        store, base = self._root.store, self._root.base
        names = _names(self._root)
        come = names - self._names
        name = self._name_of(found.place)
        shown = self._around(name, names, come)
        near = read_again(replace(self._root, store=_Glimpse(store, base, shown)))
        self._take_in(near, shown, come)
        self._names = names
        # What is not shown here stands all the same: a pointer to it means no other.
        pointers = [p for p in near.pointers if p.target or _last(p.says) not in names]
        near = replace(near, store=store, pointers=tuple(pointers))
        return EntryHolds.of(near, now, name).added_to(found).entry, self._news()

    def forget(self, found: ScannedEntry) -> None:
        """Take an entry for gone: what has its name from now on is another one."""
        self._names.discard(self._name_of(found.place))

    def _around(self, name: str, names: set[str], come: set[str]) -> list[Entry]:
        """Return whatever a pointer to an entry may name, every pointer, and what has come."""
        store, base = self._root.store, self._root.base
        shown: dict[str, Entry] = {}
        if name in self._candidates:
            same = self._of_step[self._candidates[name].step]
            shown = {path: c.entry for path, c in same.items() if path in names}
        if come and FOLDER in names:  # what has come may be dropped again by now
            shown[FOLDER] = Entry(join(base, FOLDER), 0, kind=EntryKind.DIRECTORY)
        for asked in come | (self._pointing & names):
            with suppress(NotFoundError):
                shown[asked] = store.stat(join(base, asked))
        return [shown[each] for each in sorted(shown)]

    def _take_in(self, near: Root, shown: Sequence[Entry], come: set[str]) -> None:
        """Remember what has come."""
        if not come:
            return
        candidates = [c for c in near.candidates if c.path in come]
        for candidate in candidates:
            self._candidates[candidate.path] = candidate
            self._of_step[candidate.step][candidate.path] = candidate
        foreign = (name for name in near.foreign if name in come)
        self._root = replace(
            self._root,
            candidates=tuple(self._candidates.values()),
            foreign=(*self._root.foreign, *foreign),
            tombs=near.tombs,
        )
        self._pointing |= {p.name for p in near.pointers} | self._links(shown)
        self._unsettled += candidates

    def _news(self) -> list[ScannedEntry]:
        """Return what is not settled as it is now; what has gone is forgotten."""
        news, unsettled = [], []
        for candidate in self._unsettled:
            with suppress(NotFoundError):
                found = classify(self._root, candidate, self._how)
                news.append(found)
                if found.entry.entry_class not in _SETTLED:
                    unsettled.append(candidate)
        self._unsettled = unsettled
        return news

    def _links(self, entries: Iterable[Entry]) -> set[str]:
        return {self._name_of(entry) for entry in entries if entry.link is not None}

    def _name_of(self, entry: Entry) -> str:
        """Return the name of what lies in the root, relative to it."""
        return entry.path[len(self._root.base) + 1 if self._root.base else 0 :]


class _Glimpse(OverlayStore):
    """A store that shows of one of its directories only some names."""

    def __init__(self, below: Store, path: str, entries: Sequence[Entry]) -> None:
        super().__init__(below, {})
        self._path = path
        self._entries = entries

    def children(self, path: str = "") -> list[Entry]:
        """Return what lies directly below `path`, as far as it is shown."""
        return list(self._entries) if path == self._path else self._below.children(path)

    def local_path(self, path: str = "") -> str | None:
        """Return the path on this machine, or None where the store is not local."""
        return self._below.local_path(path)


def _names(root: Root) -> set[str]:
    """List a root; of a local one the names alone, which is several times faster than the kinds."""
    local = root.store.local_path(root.base)
    if local is None:
        return set(root.store.names(root.base))
    try:
        return set(twice(lambda: os.listdir(local)))
    except OSError as error:
        raise translate(error, local, "list", root.base) from error


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
