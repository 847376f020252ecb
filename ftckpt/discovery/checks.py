"""The check of `latest`: verify, or believe the ledger of the root."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import ExitCode, FtckptError
from ftckpt.findings import Finding
from ftckpt.storage import StoreOptions
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from ftckpt.workers import ALONE, Work

from .ledger import LEVELS, CheckedPlace, KeptVerdict, Ledger, Remembered, depth, is_answer
from .roots import Root


class Verify(Protocol):
    """Verifies a checkpoint, as `ftckpt.verification.verify` does."""

    def __call__(
        self,
        checkpoint: Checkpoint,
        options: VerifyOptions,
        *,
        work: Work,
        emit: Callable[[Finding], None],
    ) -> VerifyReport:
        """Return the verdict."""


@dataclass
class Checks:
    """Checks checkpoints one after the other, and remembers the results.

    One that is known to be bad is never read at a level that could not show it; at a level that
    can, it is read again, because it may be good again. What somebody else says of it is not
    believed, because it would hide a good one for ever, nor passed over: the content is read.

    Attributes:
        options: for each check.
        reuse: seconds for which a remembered verdict stands for a check; None: only a bad one does.
        ledger: directory or URL of the ledger; "" for that of the root.
        note: called with verdicts that stand for a check, and why one could not be remembered.
        reads: verifies what is to be read.
        taken: the verdicts that stood for a check, by the checkpoint's URL.
    """

    options: VerifyOptions
    stores: StoreOptions = field(default_factory=StoreOptions)
    reuse: float | None = None
    ledger: str = ""
    work: Work = ALONE
    note: Callable[[str], None] = lambda _: None
    reads: Verify = verify
    taken: dict[str, Remembered] = field(default_factory=dict)

    def __call__(self, checkpoint: Checkpoint, root: Root) -> tuple[ExitCode, str]:
        """Return the exit code and a sentence for one checkpoint of a root.

        Raises:
            FtckptError: it could not be checked.
        """
        ledger = Ledger(root.store, root.base, self.ledger, self.stores)
        part = CheckedPlace(root.store, checkpoint=checkpoint)
        known = ledger.standing(part)
        wanted = LEVELS.index(self.options.level.value)
        bad = known.bad
        if bad is not None and not bad.own:
            return self._as_somebody_says(ledger, part, bad)
        if bad is not None and (self._is_fresh(bad) or wanted < depth(bad.verdict)):
            return ExitCode(bad.verdict.code), f"{bad.verdict.reason} ({told(bad)})"
        if wanted == 0:
            report = verify(checkpoint, self.options, work=self.work)
            return report.code, report.message
        good = known.good
        if (
            good is not None
            and good.verdict.proven
            and depth(good.verdict) >= wanted
            and self._is_fresh(good)
        ):
            structure = replace(self.options, level=Level.STRUCTURE, require_content=False)
            report = verify(checkpoint, structure, work=self.work)
            if report.code is ExitCode.OK:
                self.note(
                    f"note: the content of {checkpoint.source.url} was not read: it passed "
                    f"by {good.verdict.evidence} ({told(good)})"
                )
                self.taken[checkpoint.source.url] = good
            return report.code, report.message
        note = self.note if self.reuse is not None else _quiet
        keeper = Keeper(ledger, self.options, note, self.reads)
        report = keeper.check(checkpoint, part, self.work)
        return report.code, report.message

    def _as_somebody_says(
        self, ledger: Ledger, part: CheckedPlace, bad: Remembered
    ) -> tuple[ExitCode, str]:
        """Check as deep as the one who calls a checkpoint bad; remember the result."""
        checkpoint = part.checkpoint
        assert checkpoint is not None
        level = max(Level(bad.verdict.level), self.options.level, key=LEVELS.index)
        if self.options.level is Level.STRUCTURE and level is Level.CONTENT:
            level = Level.AUTO  # evidence was not asked for
        self.note(
            f"note: {checkpoint.source.url} is read, because somebody else calls it bad:"
            f" {bad.verdict.reason} ({told(bad)})"
        )
        options = replace(self.options, level=level)
        report = Keeper(ledger, options, self.note).check(checkpoint, part, self.work)
        return report.code, report.message

    def _is_fresh(self, one: Remembered) -> bool:
        return self.reuse is not None and time.time() - one.verdict.checked <= self.reuse


@dataclass(frozen=True)
class Keeper:
    """Checks checkpoints, and keeps the verdicts in the ledger of their root.

    Attributes:
        note: called with the reason where one could not be kept.
        reads: verifies.
    """

    ledger: Ledger
    options: VerifyOptions
    note: Callable[[str], None] = lambda _: None
    reads: Verify = verify

    def check(
        self,
        checkpoint: Checkpoint,
        part: CheckedPlace,
        work: Work = ALONE,
        emit: Callable[[Finding], None] = lambda _: None,
    ) -> VerifyReport:
        """Verify a checkpoint and keep the verdict; `emit` gets each finding.

        Raises:
            FtckptError: it could not be checked.
        """
        before = self.begin(part)
        report = self.reads(checkpoint, self.options, work=work, emit=emit)
        self.end(part, before, report)
        return report

    def begin(self, part: CheckedPlace) -> str:
        """Return the identity of what is going to be checked; "" where it cannot be known."""
        try:
            return part.identity()
        except FtckptError:
            return ""

    def end(self, part: CheckedPlace, before: str, report: VerifyReport) -> None:
        """Keep a verdict on files that had the identity `before` when the check began."""
        made = verdict_of(report, self.options, self.ledger.name(part.place), before)
        if made is None:
            return
        said = ""
        try:
            if not before:
                said = "nothing that the store shows changes with the content"
            elif part.identity() != before:
                said = "files changed during the check"
            else:
                self.ledger.write(part.place, made)
        except FtckptError as error:
            said = error.message
        if said:
            self.note(f"note: the check is not remembered: {said}")


def verdict_of(
    report: VerifyReport, options: VerifyOptions, name: str, identity: str
) -> KeptVerdict | None:
    """Return what a check says about a checkpoint alone; None where it says nothing.

    A difference from a replica, or from a manifest that is kept elsewhere, may be a fault of that.
    """
    passed = report.code is ExitCode.OK
    other = options.against is not None or options.manifest is not None
    if not is_answer(report.code) or (other and not passed):
        return None
    from ftckpt.retention.records.who import actor

    level = "content" if options.level is Level.AUTO else options.level.value
    evidence = report.evidence
    if passed:
        level = report.level.value
        if report.sampled is not None or (not report.whole and report.level is Level.CONTENT):
            level, evidence = "structure", "none"
        elif not report.whole:
            evidence = "none"
    return KeptVerdict(
        name, level, int(report.code), report.message[:500], evidence, report.bytes_read,
        report.seconds, time.time(), identity, actor(), bool(options.strict) and not passed,
    )  # fmt: skip


def told(one: Remembered) -> str:
    """Say when and by whom a verdict was found, and where it stands."""
    ago = _ago(max(0.0, time.time() - one.verdict.checked))
    return f"checked {ago} ago by {one.verdict.by}, and no file has changed: {one.url}"


def _quiet(_: str) -> None: ...


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
