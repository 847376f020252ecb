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
    standing,
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
from ftckpt.verification import Level, VerifyOptions, failed, verify
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
        known = self._standing(found)
        by_values = known.good is not None and known.good.verdict.level == "values"
        level = ScanDepth.VALUES if by_values else ScanDepth.CONTENT
        return judged_as(found.now(looked=level), known)

    def _standing(self, found: ScannedEntry) -> ContentStanding:
        assert found.child is not None
        root, part = found.root, found.child.part
        keeper = Keeper(Ledger(root.store, root.base), _BY_EVIDENCE)
        place = CheckedPlace(root.store, part)
        before = keeper.begin(place)
        try:
            checkpoint = open_part(root.store, part)
            report = verify(checkpoint, _BY_EVIDENCE, work=self._work)
            if report.code is ExitCode.UNVERIFIED:
                keeper = replace(keeper, options=_BY_VALUES)
                report = verify(checkpoint, _BY_VALUES, work=self._work)
        except NotFoundError:
            return ContentStanding()
        except _ABOUT_IT as error:
            report = failed(error)
        keeper.end(place, before, report)
        made = verdict_of(report, keeper.options, keeper.ledger.name(place.place), before)
        if made is None:
            return ContentStanding()
        return standing([Remembered(made, "", own=True)], before, time.time())


def _is_same(known: RootEntry, now: RootEntry) -> bool:
    then, here = known.contents, now.contents
    same = then is not None and here is not None and then.fingerprint == here.fingerprint
    return same and now.entry_class is EntryClass.COMMITTED
