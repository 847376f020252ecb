"""Read the content of what a plan keeps: one survivor must have passed before anything goes."""

from __future__ import annotations

import time
from dataclasses import replace

from ftckpt.discovery.checks import Keeper, verdict_of
from ftckpt.discovery.ledger import (
    CheckedPlace,
    ContentStanding,
    Ledger,
    Remembered,
    parts_of,
    standing,
    together,
)
from ftckpt.discovery.open_part import open_part
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    IncompleteError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.retention.scan.entries import EntryClass, RootEntry, ScanDepth
from ftckpt.retention.scan.entry import ScannedEntry
from ftckpt.retention.scan.read import judged_as
from ftckpt.verification import Level, VerifyOptions, VerifyReport, failed, verify
from ftckpt.workers import ALONE, Work

# Without evidence, the deepest check is of the numbers themselves.
_BY_EVIDENCE, _BY_VALUES = VerifyOptions(Level.CONTENT), VerifyOptions(Level.VALUES)
_ABOUT_IT = (CorruptError, IncompleteError, UnsafeError, UnsupportedError)


class ContentCheck:
    """Reads survivors, keeps the verdicts in the ledgers of their roots, and remembers them itself.

    A full disk keeps no ledger, and gc is needed most then.

    Attributes:
        asked: whether a plan was made with it, so that what that keeps has been read.
    """

    def __init__(self, work: Work = ALONE) -> None:
        self.asked = False
        self._work = work
        self._known: dict[str, ScannedEntry] = {}

    def __call__(self, found: ScannedEntry) -> ScannedEntry:
        """Return an entry with the verdict on its content; one that fails does not survive.

        Raises:
            UnavailableError, DeniedError, NoResourceError: it could not be read.
        """
        known = self._known.get(found.entry.name)
        if known is None or not _is_same(known.entry, found.entry):
            known = self._known[found.entry.name] = self._read(found)
        return found.now(
            verdict=known.entry.verdict, entry_class=known.entry.entry_class, why=known.entry.why,
            looked=known.entry.looked,
        )  # fmt: skip

    def _read(self, found: ScannedEntry) -> ScannedEntry:
        assert found.child is not None
        ledger = Ledger(found.root.store, found.root.base)
        parts = parts_of(found.root, found.child.parts)
        verdicts = [self._part(ledger, part) for part in parts]
        level = ScanDepth.CONTENT
        if any(one.good is not None and one.good.verdict.level == "values" for one in verdicts):
            level = ScanDepth.VALUES
        return judged_as(found.now(looked=level), together(verdicts))

    def _part(self, ledger: Ledger, part: CheckedPlace) -> ContentStanding:
        assert part.part is not None
        keeper = Keeper(ledger, _BY_EVIDENCE)
        before = keeper.begin(part)
        try:
            checkpoint = open_part(part.store, part.part)
            report = verify(checkpoint, _BY_EVIDENCE, work=self._work)
            if report.code is ExitCode.UNVERIFIED:
                keeper = replace(keeper, options=_BY_VALUES)
                report = verify(checkpoint, _BY_VALUES, work=self._work)
        except NotFoundError:
            return ContentStanding()
        except _ABOUT_IT as error:
            report = failed(error)
        return _standing(ledger, keeper, part, before, report)


def _standing(
    ledger: Ledger, keeper: Keeper, part: CheckedPlace, before: str, report: VerifyReport
) -> ContentStanding:
    keeper.end(part, before, report)
    made = verdict_of(report, keeper.options, ledger.name(part.place), before)
    if made is None:
        return ContentStanding()
    return standing([Remembered(made, "", own=True)], before, time.time())


def _is_same(known: RootEntry, now: RootEntry) -> bool:
    then, here = known.contents, now.contents
    same = then is not None and here is not None and then.fingerprint == here.fingerprint
    return same and now.entry_class is EntryClass.COMMITTED
