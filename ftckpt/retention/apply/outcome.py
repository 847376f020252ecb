"""The outcome of dropping, purging and undeleting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from ftckpt.errors import ExitCode, FtckptError, worst
from ftckpt.retention.policy.plan import Decision, Reason
from ftckpt.retention.trash import Trashed


@dataclass(frozen=True, kw_only=True)
class ApplyOutcome(ABC):
    """What was done, and what was not.

    Attributes:
        failed: what was to be done and was not, and why: by the name of the entry, or by the path
            of what was to be reclaimed.
        notes: what the reader should know.
    """

    failed: Mapping[str, FtckptError] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    @abstractmethod
    def done(self) -> int:
        """How many things were done."""

    @property
    def code(self) -> ExitCode:
        """OK where all was done, PARTIAL where some was.

        Where nothing was done, and wherever something hostile was met, the code of the failure.
        """
        codes = {error.exit_code for error in self.failed.values()}
        if not codes or ExitCode.UNSAFE in codes or not self.done:
            return worst(codes)
        return ExitCode.PARTIAL


@dataclass(frozen=True, kw_only=True)
class Purged(ApplyOutcome):
    """What was reclaimed of the trash.

    Attributes:
        erased: what is gone for good.
        held: what stays although its time is up, by its path in the trash, and why.
        freed: bytes.
    """

    erased: tuple[Trashed, ...] = ()
    held: Mapping[str, Reason] = field(default_factory=dict)
    freed: int = 0

    @property
    def done(self) -> int:
        """How many things are gone for good."""
        return len(self.erased)


@dataclass(frozen=True, kw_only=True)
class Applied(ApplyOutcome):
    """What was dropped of a root.

    Attributes:
        plan: the plan's id.
        dropped: what went, in this order.
        trashed: what of it can be had back.
        absent: names of what had gone before, or is being removed by somebody else.
        freed: bytes that were reclaimed, those of `purged` not counted.
        waiting: bytes that will be when the trash is purged.
        purged: what was reclaimed of the trash before; None where that was not asked for.
    """

    plan: str
    dropped: tuple[Decision, ...] = ()
    trashed: tuple[Trashed, ...] = ()
    absent: tuple[str, ...] = ()
    freed: int = 0
    waiting: int = 0
    purged: Purged | None = None

    @property
    def done(self) -> int:
        """How many entries went."""
        return len(self.dropped)

    @property
    def code(self) -> ExitCode:
        """The code of the dropping, or of the purge where that weighs more."""
        own = super().code
        return own if self.purged is None else worst((own, self.purged.code))


@dataclass(frozen=True, kw_only=True)
class Undeleted(ApplyOutcome):
    """What was had back from the trash.

    Attributes:
        restored: what has its old name again.
    """

    restored: tuple[Trashed, ...] = ()

    @property
    def done(self) -> int:
        """How many have their old names again."""
        return len(self.restored)
