"""The check of `latest`: verify, or reuse a receipt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import ExitCode, FtckptError
from ftckpt.findings import Finding
from ftckpt.storage import StoreOptions
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from ftckpt.workers import ALONE, Work

if TYPE_CHECKING:
    from ftckpt.verification.receipts import Book, Receipt


@dataclass(frozen=True)
class Reuse:
    """Valid receipts: maximum age in seconds, and folder ("": beside each checkpoint)."""

    max_age: float
    folder: str = ""


@dataclass
class Checks:
    """Checks checkpoints one after the other, and remembers the results.

    Attributes:
        options: for each check.
        reuse: which receipts are valid, and where to write new ones; None: no receipts.
        note: called with reused, ignored and unwritable receipts.
        taken: the reused receipts, by the checkpoint's URL.
    """

    options: VerifyOptions
    stores: StoreOptions = field(default_factory=StoreOptions)
    reuse: Reuse | None = None
    work: Work = ALONE
    note: Callable[[str], None] = lambda _: None
    taken: dict[str, tuple[Receipt, str]] = field(default_factory=dict)

    def __call__(self, checkpoint: Checkpoint) -> tuple[ExitCode, str]:
        """Return the exit code and a sentence for one checkpoint.

        Raises:
            FtckptError: it could not be checked.
        """
        if self.reuse is None or self.options.level not in (Level.CONTENT, Level.VALUES):
            report = verify(checkpoint, self.options, work=self.work)
            return report.code, report.message
        from ftckpt.verification.receipts import Book

        book = Book(checkpoint, self.stores, self.reuse.folder)
        receipt, ignored = book.find(self.options.level.value, self.reuse.max_age)
        if ignored:
            self.note(f"note: {ignored}")
        if receipt is not None:
            structure = replace(self.options, level=Level.STRUCTURE, require_content=False)
            report = verify(checkpoint, structure, work=self.work)
            if report.code is ExitCode.OK:
                age = max(0.0, time.time() - receipt.checked)
                self.note(
                    f"note: the content of {checkpoint.source.url} was not read: it passed "
                    f"{_ago(age)} ago by {receipt.evidence}, and no file has changed ({book.url})"
                )
                self.taken[checkpoint.source.url] = receipt, book.url
            return report.code, report.message
        report = check_and_remember(checkpoint, self.options, book, self.work, self.note)
        return report.code, report.message


def check_and_remember(
    checkpoint: Checkpoint,
    options: VerifyOptions,
    book: Book,
    work: Work = ALONE,
    note: Callable[[str], None] = lambda _: None,
    emit: Callable[[Finding], None] = lambda _: None,
) -> VerifyReport:
    """Verify a checkpoint, and keep a receipt in `book` if every byte was checked and passed.

    `note` gets the reason if no receipt could be kept; `emit` gets each finding.

    Raises:
        FtckptError: it could not be checked.
    """
    from ftckpt.verification.receipts import Receipt, fingerprint, manifest_digest

    said = ""
    before = manifest = ""
    try:
        before, manifest = fingerprint(checkpoint.source), manifest_digest(checkpoint.source)
    except FtckptError as error:
        said = error.message
    report = verify(checkpoint, options, work=work, emit=emit)
    # Only a check that demands evidence for every byte can replace `latest --verify content`.
    demanded = options.level is Level.CONTENT or options.require_content
    read = report.level in (Level.CONTENT, Level.VALUES) and report.evidence != "none"
    if report.code is not ExitCode.OK or not (demanded and read) or report.sampled is not None:
        return report
    try:
        if not book.bound:
            said = "a delta's base may change alone"
        elif before and fingerprint(checkpoint.source) != before:
            said = "files changed during the check"
        if not said:
            book.write(
                Receipt(
                    book.place, report.level.value, report.evidence, report.message,
                    report.bytes_read, time.time(), before, manifest,
                )
            )  # fmt: skip
    except FtckptError as error:
        said = error.message
    if said:
        note(f"note: the check is not remembered: {said}")
    return report


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
