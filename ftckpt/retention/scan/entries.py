"""Read a root as records, one a name, with all the evidence about it.

The policy decides by these records alone; nothing is read or asked while it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ftckpt.checkpoint import CommitState


class EntryClass(StrEnum):
    """What a name in a root is.

    COMMITTED: a format says that the save was finished, and nothing showed damage. Where a format
        has no commit marker, nothing shows that it is unfinished (`RootEntry.commit`).
    STAGING: a save that is not finished; its newest file is younger than the grace.
    ABANDONED: a save that is not finished and has not been written to since.
    CORRUPT: proven damage; kept as evidence.
    TRASH: dropped by an earlier run, not reclaimed yet.
    FOREIGN: nothing that retention may judge.
    """

    COMMITTED = "COMMITTED"
    STAGING = "STAGING"
    ABANDONED = "ABANDONED"
    CORRUPT = "CORRUPT"
    TRASH = "TRASH"
    FOREIGN = "FOREIGN"


class ScanDepth(StrEnum):
    """How far an entry was looked into.

    NAMES: the names, sizes and times of its files.
    HEADERS: it was opened, for its step or for a commit marker that no listing shows.
    STRUCTURE: its structure was checked.
    UNCHANGED: no file has changed since its structure was checked by an earlier run.
    """

    NAMES = "names"
    HEADERS = "headers"
    STRUCTURE = "structure"
    UNCHANGED = "unchanged"


class SharedFile(NamedTuple):
    """A file that has several names (hard links): it is freed with the last of them.

    Attributes:
        inode: `device:inode`.
        size: bytes.
        links: how many names it has in all, anywhere.
        here: how many of them lie in this entry.
    """

    inode: str
    size: int
    links: int
    here: int


@dataclass(frozen=True, slots=True)
class EntryContents:
    """The files of an entry, summed up.

    Attributes:
        files: how many names.
        nbytes: sum of the sizes, a file of several names counted once.
        unshared: the part of `nbytes` in files that have no other name.
        shared: the others.
        newest: modification time of the newest file, in seconds since the epoch; None where the
            store keeps none.
        fingerprint: digest over every name, kind, size, time and version: equal as long as nothing
            in the entry has changed (`contents.fingerprint_of`).
    """

    files: int
    nbytes: int
    unshared: int
    shared: tuple[SharedFile, ...]
    newest: float | None
    fingerprint: str


class Pin(NamedTuple):
    """Somebody's wish that an entry is kept.

    Attributes:
        entry: its name, relative to the run's root.
        owner: who.
        reason: why, in words.
        time: when, in seconds since the epoch; None where the record does not say.
    """

    entry: str
    owner: str
    reason: str
    time: float | None


class Lease(NamedTuple):
    """A reader's claim on an entry, for a while.

    Attributes:
        entry: its name, relative to the run's root.
        holder: who reads.
        expires: in seconds since the epoch.
    """

    entry: str
    holder: str
    expires: float


@dataclass(frozen=True, slots=True)
class RootEntry:
    """One name in a root, and what is known of it.

    Attributes:
        name: path relative to the place that was given; unique there.
        group: the run it belongs to: the path of that run's root, "" for the place itself.
        entry_class: what it is.
        step: by its name or by its content; None where neither says.
        time: when it was saved, in seconds since the epoch; None where the store does not say.
        format: who recognised it; "" where no format did.
        why: why it is of this class, in words.
        commit: whether its format says that the save was finished; None where no format knows it.
        looked: how far it was looked into.
        contents: its files; None where they were not listed.
        checked: whether its structure was checked and passed.
        verified: whether it is sealed and its content passed a check then; looked up only as far as
            it takes to find the newest.
        named: whether its name gives it a part to play (`last`, `best`, `final`).
        pointers: names of the pointers of the root that mean it.
        pins: who wants it kept.
        leases: who reads it.
        tags: its tags.
        bases: names of the entries that it depends on, and places of other checkpoints.
        metric: the value of the policy's metric; None where it was not asked for or is not known.
    """

    name: str
    group: str
    entry_class: EntryClass
    step: int | None = None
    time: float | None = None
    format: str = ""
    why: str = ""
    commit: CommitState | None = None
    looked: ScanDepth = ScanDepth.NAMES
    contents: EntryContents | None = None
    checked: bool = False
    verified: bool = False
    named: bool = False
    pointers: tuple[str, ...] = ()
    pins: tuple[Pin, ...] = ()
    leases: tuple[Lease, ...] = ()
    tags: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    metric: float | None = None

    @property
    def age_order(self) -> tuple[float, float, str]:
        """Key that sorts the oldest first: by step, then by time, then by name."""
        step = -1.0 if self.step is None else float(self.step)
        return step, -1.0 if self.time is None else self.time, self.name
