"""The outcomes of dropping, purging and undeleting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from ftckpt.errors import ExitCode, FtckptError, worst
from ftckpt.reports import UNSAID, said_as
from ftckpt.retention.policy.plan import Decision, Reason
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
    freed: int = 0

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
    freed: int = 0
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
    freed: int = 0
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
