"""The records of a root, one per name, with all the evidence about it.

The policy decides by these records alone; it reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.series import place_of


class EntryClass(StrEnum):
    """The class of a name in a root.

    COMMITTED: finished, as its format shows, and without known damage. If its format has no commit
        marker, nothing shows that it is unfinished (`RootEntry.commit`).
    STAGING: unfinished, as far as anything shows; its newest file is younger than the grace, or
        nothing shows that its writer died.
    ABANDONED: unfinished by a mark of its writer, and not written to since.
    CORRUPT: proven damage, or known to be bad by an own verdict; kept as evidence.
    UNSAFE: hostile or ambiguous content, which may be a flipped bit or a form that ftckpt does not
        know; or bad by the verdict of somebody else. It proves nothing, so it is never dropped.
    TRASH: dropped by an earlier run, not freed yet.
    FOREIGN: retention may not judge it.
    """

    COMMITTED = "COMMITTED"
    STAGING = "STAGING"
    ABANDONED = "ABANDONED"
    CORRUPT = "CORRUPT"
    UNSAFE = "UNSAFE"
    TRASH = "TRASH"
    FOREIGN = "FOREIGN"


class ScanDepth(StrEnum):
    """How deeply an entry was examined.

    NAMES: names, sizes and times of its files.
    HEADERS: opened, for its step or for a commit marker that no listing shows.
    STRUCTURE: its structure was checked.
    UNCHANGED: no file has changed since an earlier run checked its structure.
    CONTENT: every byte was read and held to evidence.
    VALUES: without evidence, the numbers were read.
    """

    NAMES = "names"
    HEADERS = "headers"
    STRUCTURE = "structure"
    UNCHANGED = "unchanged"
    CONTENT = "content"
    VALUES = "values"


class SharedFile(NamedTuple):
    """A file with several names (hard links): the last of them frees it.

    Attributes:
        inode: `device:inode`.
        size: bytes.
        links: number of its names anywhere.
        here: number of its names in this entry.
    """

    inode: str
    size: int
    links: int
    here: int


@dataclass(frozen=True, slots=True)
class EntryContents:
    """The files of an entry, summed up.

    Attributes:
        files: number of names.
        nbytes: sum of the sizes; a file with several names counts once.
        unshared: the part of `nbytes` in files without other names.
        shared: the other files.
        newest: when the last of its files came or changed, in seconds since the epoch; None if the
            store keeps no times.
        fingerprint: digest over names, kinds, sizes, times and versions
            (`contents.fingerprint_of`).
        run: the path of another run's checkpoint or root among them (`inside.with_run`); "" if
            none shows.
        linked: sum of the sizes of what its links lead to, which nothing frees.
    """

    files: int
    nbytes: int
    unshared: int
    shared: tuple[SharedFile, ...]
    newest: float | None
    fingerprint: str
    run: str = ""
    linked: int = 0


class Pin(NamedTuple):
    """A request to keep an entry.

    Attributes:
        entry: its name, relative to the run's root.
        reason: why; "" where none was given.
        time: seconds since the epoch; None if the record has none.
    """

    entry: str
    owner: str
    reason: str
    time: float | None

    @property
    def who(self) -> str:
        """Say whose it is, and why."""
        return f"by {self.owner}: {self.reason}" if self.reason else f"by {self.owner}"


class Lease(NamedTuple):
    """A reader's claim on an entry, for a while.

    Attributes:
        entry: its name, relative to the run's root.
        expires: in seconds since the epoch.
    """

    entry: str
    holder: str
    expires: float


# Why a step whose files lie among those of other steps stays: one file of it is a part.
SHARED = "its files share a directory with other steps: gc drops whole directories"


class EntryVerdict(NamedTuple):
    """What the root's ledger says of an entry as its files are now (`ftckpt.discovery.ledger`).

    Attributes:
        code: the exit code of the check.
        level: how deep it was.
        read: whether every byte was read and passed, by the deepest evidence of the format.
        evidence: by which the content was checked; `none` without any.
        checked: in seconds since the epoch.
        by: user and machine.
        reason: in a sentence.
        own: whether it is of the root's owner, the reader or the superuser.
    """

    code: int
    level: str
    read: bool
    evidence: str
    checked: float
    by: str
    reason: str
    own: bool


@dataclass(frozen=True, slots=True)
class RootEntry:
    """One name in a root, and the facts about it.

    Attributes:
        name: path relative to the place; unique there.
        group: the path of its run's root, "" for the place itself.
        step: by its name or content; None if neither shows it.
        time: when it was saved, in seconds since the epoch; None if the store keeps no times.
        format: "" if no format recognised it.
        why: why it has this class, in words.
        commit: its commit state; None if no format knows it.
        contents: its files; None if they were not listed.
        checked: whether its structure was checked and passed.
        verified: whether it was sealed after a content check; determined only as far as needed to
            find the newest.
        verdict: what is known of its content; None for nothing.
        named: whether trainers load it by its name (`last`, `best`, `final`).
        pointers: names of the root's pointers to it.
        bases: names of entries that a delta is built on, and places of other checkpoints.
        needs: paths that it needs besides (`links.with_needs`); for a local checkpoint, known where
            its files were listed.
        metric: the value of the policy's metric; None if unknown or without one.
        thinned: the name of the entry whose weights it holds, and nothing else; "" for an entry as
            it was saved.
        weights: bytes that its weights alone would take; None if nobody asked, or it cannot be
            thinned.
        whole: why it cannot be thinned, in words; "" if nobody asked, or it can.
        no_state: whether it was opened and holds no state of a training.
        counts: the other counters of one without a step (`epoch`), as its content names them.
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
    verdict: EntryVerdict | None = None
    named: bool = False
    pointers: tuple[str, ...] = ()
    pins: tuple[Pin, ...] = ()
    leases: tuple[Lease, ...] = ()
    tags: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    metric: float | None = None
    thinned: str = ""
    weights: int | None = None
    whole: str = ""
    no_state: bool = False
    counts: tuple[tuple[str, int], ...] = ()

    @property
    def is_listed(self) -> bool:
        """Whether it is a checkpoint here: not the trash, and not what no format reads."""
        others = (EntryClass.FOREIGN, EntryClass.TRASH)
        return self.entry_class not in others or self.why == SHARED

    @property
    def content_passed(self) -> bool:
        """Whether its content is known to have passed a check, as its files are now."""
        return self.verdict is not None and self.verdict.read

    @property
    def depends_on(self) -> tuple[str, ...]:
        """The paths of all that must stay while it does."""
        return (*self.bases, *(path for path in self.needs if path not in self.bases))

    @property
    def age_order(self) -> tuple[float, tuple[float, ...], float, str]:
        """Sort key, the oldest first: by step, then by time, then by name.

        Without a step the numbers of its series come before the time (`epoch_9`, `epoch_10`).
        """
        numbers: tuple[float, ...] = ()
        if self.step is None:
            place = place_of(self.name)
            numbers = () if place is None else place.numbers
        step = -1.0 if self.step is None else float(self.step)
        return step, numbers, -1.0 if self.time is None else self.time, self.name
