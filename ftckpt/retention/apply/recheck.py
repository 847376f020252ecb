"""Reread a root while entries are dropped: new entries, and claims on the next one.

A root can have ten thousand names, and any may be dropped next. So each look lists names only, and
examines new ones, links and pointers (their targets can change), and unfinished saves.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.roots import Answers, Candidate, Root, read_again
from ftckpt.errors import NotFoundError
from ftckpt.own_files import FOLDER, is_own
from ftckpt.retention.scan.classify import classify
from ftckpt.retention.scan.entries import EntryClass, RootEntry
from ftckpt.retention.scan.entry import ScannedEntry, ScanOptions
from ftckpt.retention.scan.read import EntryHolds, of_no_checkpoint
from ftckpt.retention.trash import BESIDE
from ftckpt.storage.local.oserror import translate, twice
from ftckpt.storage.readonly import OverlayStore
from ftckpt.storage.store import Entry, EntryKind, Store, join, relative

# Entries of these classes stay so until somebody changes them.
_SETTLED = (EntryClass.COMMITTED, EntryClass.CORRUPT, EntryClass.UNSAFE)


class Watch:
    """One root, looked at repeatedly.

    Args:
        root: as first read.
        how: how to read new entries.
        unfinished: names (`RootEntry.name`) of saves that may have been finished since.

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
        self._foreign: set[str] = set()

    def look(self, found: ScannedEntry, now: float) -> tuple[RootEntry, list[ScannedEntry]]:
        """Return an entry with its present claims; and entries that are new or were unfinished.

        An entry that was just dropped is seen as if it still stood.

        Raises:
            NotFoundError: the root is gone.
            UnavailableError, DeniedError: something could not be read.
            UnsafeError: the root's `.ftckpt` is a link.
        """
        store, base = self._root.store, self._root.base
        names = _names(self._root)
        come = names - self._names
        name = self._name_of(found.place)
        shown = self._around(name, {*names, name}, come)
        near = read_again(replace(self._root, store=_Glimpse(store, base, shown)))
        self._take_in(near, shown, come)
        self._names = names
        # Names outside this view still exist: a pointer to one of them means no other entry.
        pointers = [p for p in near.pointers if p.target or _last(p.says) not in names]
        near = replace(near, store=store, pointers=tuple(pointers))
        return EntryHolds.of(near, now, name).added_to(found).entry, self._news()

    def forget(self, found: ScannedEntry) -> None:
        """Mark an entry as gone: a later entry of its name is another one."""
        self._names.discard(self._name_of(found.place))

    def _around(self, name: str, names: set[str], come: set[str]) -> list[Entry]:
        """Return possible targets of pointers to an entry, all pointers, and new names."""
        store, base = self._root.store, self._root.base
        shown: dict[str, Entry] = {}
        if name in self._candidates:
            same = self._of_step[self._candidates[name].step]
            shown = {path: c.entry for path, c in same.items() if path in names}
        if come and FOLDER in names:  # a new entry may have been dropped again
            shown[FOLDER] = Entry(join(base, FOLDER), 0, kind=EntryKind.DIRECTORY)
        for asked in come | (self._pointing & names):
            with suppress(NotFoundError):
                shown[asked] = store.stat(join(base, asked))
        return [shown[each] for each in sorted(shown)]

    def _take_in(self, near: Root, shown: Sequence[Entry], come: set[str]) -> None:
        if not come:
            return
        candidates = [c for c in near.candidates if c.path in come]
        for candidate in candidates:
            self._candidates[candidate.path] = candidate
            self._of_step[candidate.step][candidate.path] = candidate
        foreign = [n for n in near.foreign if n in come]
        self._foreign.update(n for n in foreign if not (is_own(n) or n.startswith(BESIDE)))
        self._root = replace(
            self._root,
            candidates=tuple(self._candidates.values()),
            foreign=(*self._root.foreign, *foreign),
            tombs=near.tombs,
        )
        self._pointing |= {p.name for p in near.pointers} | self._links(shown)
        self._unsettled += candidates

    def _news(self) -> list[ScannedEntry]:
        """Return unsettled entries as they are now; forget those that are gone."""
        news, unsettled = [], []
        root = replace(self._root, known=Answers())  # what was unfinished may be whole by now
        for candidate in self._unsettled:
            with suppress(NotFoundError):
                found = classify(root, candidate, self._how)
                news.append(found)
                # Without a marker nothing says that no more links will come.
                open_ended = found.entry.commit is CommitState.NO_MARKER
                if open_ended or found.entry.entry_class not in _SETTLED:
                    unsettled.append(candidate)
        self._unsettled = unsettled
        news += [of_no_checkpoint(self._root, name) for name in sorted(self._foreign)]
        return news

    def _links(self, entries: Iterable[Entry]) -> set[str]:
        return {self._name_of(entry) for entry in entries if entry.link is not None}

    def _name_of(self, entry: Entry) -> str:
        return relative(self._root.base, entry.path)


class _Glimpse(OverlayStore):
    """A store that shows only some names of one directory."""

    def __init__(self, below: Store, path: str, entries: Sequence[Entry]) -> None:
        super().__init__(below, {})
        self._path = path
        self._entries = entries

    def children(self, path: str = "") -> list[Entry]:
        """Return the visible entries directly below `path`."""
        return list(self._entries) if path == self._path else self._below.children(path)

    def local_path(self, path: str = "") -> str | None:
        """Return the local path, or None if the store is not local."""
        return self._below.local_path(path)


def _names(root: Root) -> set[str]:
    """List a root; a local one by names alone, which is several times faster than by kinds."""
    local = root.store.local_path(root.base)
    if local is None:
        return set(root.store.names(root.base))
    try:
        return set(twice(lambda: os.listdir(local)))
    except OSError as error:
        raise translate(error, local, "list", root.base) from error


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
