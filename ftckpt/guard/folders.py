"""Directories of a root that were written into, as their files show.

A root's listing shows no time of a prefix in an object store, and none that changes where the files
of a directory are written over. That is where a trainer has one fixed name (`last`), seals what it
has saved, or saves the step again at which it was killed. A save of many files is told of once,
when none of them changes any more; where they come long after each other, it is still one save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from ftckpt.discovery.roots import Candidate, Root
from ftckpt.errors import FtckptError
from ftckpt.own_files import FOLDER, WEIGHTS, is_own
from ftckpt.storage.store import Entry, EntryKind

# Directories whose name says no step, and whose files are listed.
_STEPLESS = 16
# Where a directory changes at each of these looks, it holds more than saves, a log perhaps.
_RESTLESS = 40
# A look at a directory costs requests, so looks leave out what stays as it is. A checkpoint that
# has not changed for 4 looks is left out of the next one, after 8 of the next two, and so on up to
# 4. What is not known as a checkpoint is left out of 1, 2, 4, ... looks, up to the square of 4.
_REST = 4

# The files of a save: path, size, time and version of each.
FilesOf = frozenset[tuple[str, int, float | None, str | None]]


def files_of(root: Root, entry: Entry) -> FilesOf:
    """Return what shows whether a save was written anew.

    Raises:
        FtckptError: it cannot be listed.
    """
    found = [entry] if entry.kind is EntryKind.FILE else root.store.walk(entry.path)
    return frozenset((one.path, one.size, one.mtime, one.etag) for one in found)


@dataclass
class _Folder:
    """One directory.

    Attributes:
        told: its files when it was told of last.
        seen: when they were listed last.
        shown: what the root's listing showed of it then.
        moving: how many looks in a row have found other files than were told of.
        idle: how many have not.
        rest: how many looks leave it out.
        save: the files that were written since its newest save began.
    """

    told: FilesOf
    seen: FilesOf
    shown: tuple[float | None, int]
    save: frozenset[str] = frozenset()
    moving: int = 0
    idle: int = 0
    rest: int = 0


@dataclass
class _Strange:
    """A directory that is not known as a checkpoint: as it was shown, and looks to leave out."""

    shown: tuple[float | None, int]
    rest: int = 1
    wait: int = 1


class Folders:
    """Tells which directories were written into since they were told of last.

    Args:
        before: names that were there when the command was started.

    Attributes:
        decided: names of which the files alone show that they are a new save.
        resting: names that this look left out, because they were no checkpoints.
        moving: whether this look found files that have not settled.
        again: names whose newest save was told of in part: no file of it was written twice.
    """

    def __init__(self, before: Iterable[str]) -> None:
        self._before = set(before)
        self._known: dict[str, _Folder] = {}
        self._strange: dict[str, _Strange] = {}
        self.decided: set[str] = set()
        self.resting: set[str] = set()
        self.again: set[str] = set()
        self.moving = False

    def note(self, root: Root) -> None:
        """Note what is there before the command starts."""
        self._before |= {c.path for c in root.candidates}
        self.look(root)

    def look(self, root: Root, *, ended: bool = False) -> set[str]:
        """Return the names of those that were written into, and whose files have settled.

        Args:
            root: as it is listed now.
            ended: whether nobody writes any more.
        """
        self.decided, self.resting = set(), set()
        found = set()
        moving = False
        for candidate in _watched(root):
            with suppress(FtckptError):
                if self._settles(root, candidate, ended=ended):
                    found.add(candidate.path)
                elif candidate.path in self._known:
                    moving |= self._known[candidate.path].moving > 0
        self.moving = moving
        return found

    def _settles(self, root: Root, candidate: Candidate, *, ended: bool) -> bool:
        name, shown = candidate.path, (candidate.entry.mtime, candidate.entry.size)
        folder = self._known.get(name)
        if folder is None:
            old = name in self._before and name not in self._strange
            if candidate.step is None and self._is_strange(root, candidate, ended=ended):
                return False
            now = _data_of(root, candidate)
            # One with a step is new by its name.
            told = now if old or candidate.step is not None else frozenset()
            folder = self._known[name] = _Folder(told, told, shown)
        elif folder.rest and folder.shown == shown and not ended:
            folder.rest -= 1
            now = folder.seen
        else:
            now = _data_of(root, candidate)
            folder.idle = 0 if now != folder.seen else folder.idle + 1
            folder.rest = min(folder.idle // _REST, _REST)
        if candidate.step is None:
            self.decided.add(name)
        settled = ended or now == folder.seen or folder.moving >= _RESTLESS
        folder.seen, folder.shown = now, shown
        if now == folder.told:
            folder.moving = 0
            return False
        if not settled:
            folder.moving += 1
            return False
        written = frozenset(one[0] for one in now ^ folder.told)
        again = bool(folder.save) and not written & folder.save
        folder.save = written | folder.save if again else written
        (self.again.add if again else self.again.discard)(name)
        folder.told, folder.moving = now, 0
        return True

    def _is_strange(self, root: Root, candidate: Candidate, *, ended: bool) -> bool:
        """Whether no format knows a directory; what was none is asked about less and less."""
        name, shown = candidate.path, (candidate.entry.mtime, candidate.entry.size)
        strange = self._strange.get(name)
        if strange is not None and strange.shown == shown and strange.rest and not ended:
            strange.rest -= 1
            self.resting.add(name)
            return True
        if root.recognise(candidate) is not None:
            self._strange.pop(name, None)
            return False
        wait = 1 if strange is None or strange.shown != shown else min(2 * strange.wait, _REST**2)
        self._strange[name] = _Strange(shown, wait, wait)
        return True


def _watched(root: Root) -> Iterator[Candidate]:
    """Yield the directories of the highest step, and those that name no step."""
    named = [c for c in root.candidates if not c.staging and not c.path.endswith(WEIGHTS)]
    folders = [c for c in named if c.entry.kind is EntryKind.DIRECTORY]
    top = max((c.step for c in folders if c.step is not None), default=None)
    yield from [c for c in folders if c.step is None][:_STEPLESS]
    yield from (c for c in folders if c.step == top is not None)


def _data_of(root: Root, candidate: Candidate) -> FilesOf:
    """Return the files of a directory; sealing `last` does not save it anew."""
    listed = files_of(root, candidate.entry)
    start = len(candidate.entry.path) + 1
    if candidate.step is None:
        return frozenset(one for one in listed if not is_own(one[0][start:]))
    return frozenset(one for one in listed if f"/{FOLDER}/" not in one[0])
