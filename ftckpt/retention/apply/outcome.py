"""The outcomes of dropping, purging and undeleting.

Compute the bytes that dropping frees, and which entries free a number of bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from ftckpt.errors import ExitCode, FtckptError, worst
from ftckpt.reports import UNSAID, Natural, said_as
from ftckpt.retention.policy.plan import Decision, Reason
from ftckpt.retention.scan.entries import RootEntry
from ftckpt.retention.trash import Trashed


class Failure(NamedTuple):
    """What could not be done.

    Attributes:
        name: of the entry, or its path in the trash.
        code: of the error.
        message: of it.
        hint: of it.
    """

    name: str
    code: ExitCode
    message: str
    hint: str


class HeldThing(NamedTuple):
    """What is kept in the trash although its time is up.

    Attributes:
        path: in the trash.
        rule, detail: the reason.
    """

    path: str
    rule: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class ApplyOutcome(ABC):
    """What was done, what failed, and remarks.

    Attributes:
        failed: the error of each failure, by entry name, or by path in the trash.
    """

    SAID: ClassVar = {"failed": "failures"}

    failed: Mapping[str, FtckptError] = field(default_factory=dict, metadata=UNSAID)
    notes: tuple[str, ...] = ()

    @property
    def failures(self) -> list[Failure]:
        """Return what failed, one by one."""
        every = self.failed.items()
        return [Failure(name, one.exit_code, one.message, one.hint) for name, one in every]

    @property
    @abstractmethod
    def done(self) -> int:
        """Count the things that were done."""

    @property
    def code(self) -> ExitCode:
        """OK if all was done, PARTIAL if some was.

        The failure's code if nothing was done, or if anything was hostile.
        """
        codes = {error.exit_code for error in self.failed.values()}
        if not codes or ExitCode.UNSAFE in codes or not self.done:
            return worst(codes)
        return ExitCode.PARTIAL


@dataclass(frozen=True, kw_only=True)
class Purged(ApplyOutcome):
    """What was freed of the trash.

    Attributes:
        erased: gone for good.
        held: kept although their time is up, with the reason, by path in the trash.
        freed: bytes.
    """

    SAID: ClassVar = {**ApplyOutcome.SAID, "held": "held_things"}

    erased: tuple[Trashed, ...] = ()
    held: Mapping[str, Reason] = field(default_factory=dict, metadata=UNSAID)
    freed: Natural = 0

    @property
    def held_things(self) -> list[HeldThing]:
        """Return what is held, one by one."""
        return [HeldThing(path, *why) for path, why in self.held.items()]

    @property
    def done(self) -> int:
        """Count the things that are gone for good."""
        return len(self.erased)


@dataclass(frozen=True)
class ThinnedEntry:
    """One entry that keeps its weights alone.

    Attributes:
        decision: of the plan.
        name: of the entry that holds the weights.
        nbytes: bytes of it.
        won: bytes that are freed in the end: those of the whole one, less its own.
    """

    SAID: ClassVar = {"name": "decision.entry.name"}

    decision: Decision = field(metadata=UNSAID)
    name: str = field(metadata=said_as("weights"))
    nbytes: int = field(metadata=said_as("bytes"))
    won: int


@dataclass(frozen=True, kw_only=True)
class Thinned(ApplyOutcome):
    """What was thinned of a root.

    Attributes:
        thinned: in this order.
        trashed: the whole ones, which can be restored.
        absent: names of entries that had gone before, or were thinned by somebody else.
        freed: bytes freed.
        waiting: bytes that a purge will free.
    """

    SAID: ClassVar = {**ApplyOutcome.SAID, "won": "won"}

    thinned: tuple[ThinnedEntry, ...] = ()
    trashed: tuple[Trashed, ...] = ()
    absent: tuple[str, ...] = ()
    freed: Natural = 0
    waiting: int = 0

    @property
    def done(self) -> int:
        """Count the thinned entries."""
        return len(self.thinned)

    @property
    def won(self) -> int:
        """Return the bytes that are freed in the end."""
        return sum(one.won for one in self.thinned)


@dataclass(frozen=True, kw_only=True)
class Applied(ApplyOutcome):
    """What was dropped of a root.

    Attributes:
        plan: the plan's id.
        dropped: in this order.
        trashed: those of them that can be restored.
        absent: names of entries that had gone before, or that somebody else is removing.
        freed: bytes freed, without those of `purged`.
        waiting: bytes that a purge will free.
        purged: result of the purge before; None without one.
    """

    SAID: ClassVar = {**ApplyOutcome.SAID, "dropped": "dropped_names"}

    plan: str
    dropped: tuple[Decision, ...] = field(default=(), metadata=UNSAID)
    trashed: tuple[Trashed, ...] = ()
    absent: tuple[str, ...] = ()
    freed: Natural = 0
    waiting: int = 0
    purged: Purged | None = None

    @property
    def dropped_names(self) -> list[str]:
        """Return the names of what was dropped, in this order."""
        return [decision.entry.name for decision in self.dropped]

    @property
    def done(self) -> int:
        """Count the dropped entries."""
        return len(self.dropped)

    @property
    def code(self) -> ExitCode:
        """The code of the drop, or of the purge if that is worse."""
        own = super().code
        return own if self.purged is None else worst((own, self.purged.code))


@dataclass(frozen=True, kw_only=True)
class Undeleted(ApplyOutcome):
    """What was restored from the trash."""

    restored: tuple[Trashed, ...] = ()

    @property
    def done(self) -> int:
        """Count the restored entries."""
        return len(self.restored)


class LinkLedger:
    """Counts the hard links that are left of each file: the last one frees the bytes."""

    def __init__(self) -> None:
        self._gone: dict[str, int] = defaultdict(int)

    def drop(self, entry: RootEntry) -> int | None:
        """Count an entry as gone; return the bytes that it frees, None if unknown."""
        contents = entry.contents
        if contents is None:
            return None
        freed = contents.unshared
        for file in contents.shared:
            before = self._gone[file.inode]
            self._gone[file.inode] = before + file.here
            if before < file.links <= before + file.here:
                freed += file.size
        return freed


def drop_order(entries: Iterable[RootEntry]) -> list[RootEntry]:
    """Return entries in drop order: the oldest first, what depends on another before it."""
    ordered = sorted(entries, key=lambda e: e.age_order)
    inside = {e.name for e in ordered}
    dependants: dict[str, list[RootEntry]] = defaultdict(list)
    for entry in ordered:
        for base in entry.depends_on:
            if base in inside:
                dependants[base].append(entry)
    placed: dict[str, None] = {}
    for entry in ordered:
        _place(entry, dependants, placed)
    by_name = {e.name: e for e in ordered}
    return [by_name[name] for name in placed]


def _place(
    entry: RootEntry, dependants: Mapping[str, Sequence[RootEntry]], placed: dict[str, None]
) -> None:
    """Place an entry after its dependants; a loop is cut where it closes."""
    waiting, entered = [(entry, False)], set()
    while waiting:
        one, ready = waiting.pop()
        if ready:
            placed.setdefault(one.name)
        elif one.name not in placed and one.name not in entered:
            entered.add(one.name)
            waiting.append((one, True))
            waiting += [(d, False) for d in reversed(dependants.get(one.name, ()))]


def enough(
    order: Sequence[RootEntry], wanted: int | None
) -> tuple[list[RootEntry], dict[str, int | None]]:
    """Return the first of `order` that free `wanted` bytes (None: all), and the bytes of each.

    The last hard link of a file frees it, so an entry's bytes depend on those before it.
    """
    ledger, freed, chosen = LinkLedger(), 0, []
    frees: dict[str, int | None] = {}
    for entry in order:
        if wanted is not None and freed >= wanted:
            break
        frees[entry.name] = ledger.drop(entry)
        freed += frees[entry.name] or 0
        chosen.append(entry)
    return chosen, frees
