"""Check the structure of what a plan keeps: only whole checkpoints count as kept.

Read the content of what a plan keeps: one survivor must have passed before anything goes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ftckpt.checkpoint import Checkpoint, CommitState
from ftckpt.discovery.candidates import BATCH, gone
from ftckpt.discovery.checks import Keeper, verdict_of
from ftckpt.discovery.fewer_files import lacking_when_open
from ftckpt.discovery.ledger import CheckedPlace, ContentStanding, Ledger, Remembered, standing
from ftckpt.discovery.listing import open_part
from ftckpt.discovery.roots import concurrently
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    IncompleteError,
    NoStateError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.findings import Severity
from ftckpt.manifest.locate import is_thinned, read
from ftckpt.own_files import MANIFEST, SUFFIX
from ftckpt.progress import NULL
from ftckpt.retention.policy import GRACE, Policy
from ftckpt.retention.policy.protections import group_entries, newest_first
from ftckpt.retention.scan.check_cache import Passed
from ftckpt.retention.scan.classify import GUESS, with_run
from ftckpt.retention.scan.entries import EntryClass, RootEntry, ScanDepth
from ftckpt.retention.scan.entry import ScannedEntry, list_entry, sum_up, with_needs
from ftckpt.retention.scan.read import judged_as
from ftckpt.storage.store import EntryKind
from ftckpt.verification import Level, VerifyOptions, check_structure, failed, verify
from ftckpt.workers import ALONE, Work

_HEAD = 4096
# Something unsafe in it, and nothing of it is proven damage.
_CLASSES = {ExitCode.UNSAFE: EntryClass.UNSAFE, ExitCode.CORRUPT: EntryClass.CORRUPT}
_CONTENT = frozenset({"content", "values"})


def checked(found: ScannedEntry, now: float, passed: Passed | None) -> ScannedEntry | None:
    """Check the structure of a committed checkpoint; return it with its result and files.

    A damaged one is CORRUPT; a young one without a commit marker in its format may still be written
    and is STAGING. None if it has been removed. Files that equal `passed` are not opened again.

    Raises:
        UnavailableError, DeniedError, NoResourceError: the storage does not answer.
    """
    listed = surveyed(found)
    if listed is None:
        return None
    contents = listed.entry.contents
    if (
        passed is not None
        and not found.entry.bases  # its bases may have gone since
        and contents is not None
        and contents.fingerprint == passed.fingerprint
    ):
        return listed.now(
            checked=True, step=passed.step, thinned=passed.thinned, looked=ScanDepth.UNCHANGED
        )
    return _opened(listed.now(looked=ScanDepth.STRUCTURE), now)


def _opened(found: ScannedEntry, now: float) -> ScannedEntry | None:
    assert found.child is not None
    try:
        opened = open_part(found.root.store, found.child.part)
        errors = _errors(opened)
        every = found.root.candidates
        lost = lacking_when_open(found.root, found.child, found.entry.step, every, opened)
        if lost is not None and lost.certain:  # to keep, as of a rank that is missing
            errors.insert(0, (ExitCode.CORRUPT, lost.message))
    except NotFoundError as absent:
        error = gone(found.root, found.child.candidate, absent)
        if error is absent:
            return None
        raise error from absent
    except CorruptError as error:
        return _damaged(found, EntryClass.CORRUPT, error.message, now)
    except UnsafeError as error:
        return _damaged(found, EntryClass.UNSAFE, error.message, now)
    except IncompleteError as error:
        return _unfinished(found, error.message, now)
    except UnsupportedError as error:
        none = isinstance(error, NoStateError)
        return found.now(entry_class=EntryClass.FOREIGN, why=error.message, no_state=none)
    if errors:
        return _judged(found, errors, now)
    thinned = found.entry.thinned
    if not thinned and is_thinned(opened.source):
        thinned = found.entry.name  # a copy under a name of its own
    step = found.entry.step if opened.step is None else opened.step
    return found.now(checked=True, step=step, thinned=thinned)


def step_by_content(found: ScannedEntry) -> int | None:
    """Return the step that the content of a checkpoint shows; None if it shows none."""
    assert found.child is not None
    try:
        return open_part(found.root.store, found.child.part).step
    except (CorruptError, UnsafeError, IncompleteError, UnsupportedError, NotFoundError):
        return None  # the check of kept entries reports that


def newest_verified(members: Sequence[ScannedEntry], now: float) -> ScannedEntry | None:
    """Return the newest committed checkpoint of a run whose content passed a check.

    The ledger remembers it, or it was sealed afterwards.

    Checkpoints dated in the future and those without a step do not count.

    Raises:
        UnavailableError, DeniedError: a manifest could not be read.
    """
    by_name = {f.entry.name: f for f in members}
    run = group_entries([f.entry for f in members], now, Policy(any_name=True))
    for stretch in reversed(run.stretches):
        by_step, _ = newest_first(stretch)
        passed = next((n for n, entry in enumerate(by_step) if entry.content_passed), None)
        # Only a newer one that was sealed after a check is newer evidence.
        newer = [by_name[entry.name] for entry in by_step[:passed]]
        found = first_verified(newer, {})
        if found is None and passed is not None:
            found = by_name[by_step[passed].name]
        if found is not None:
            return found.now(verified=True)
    return None


def first_verified(members: Iterable[ScannedEntry], known: dict[str, bool]) -> ScannedEntry | None:
    """Return the first member that was sealed after a content check.

    `known` caches the answers by name and is extended.

    Raises:
        UnavailableError, DeniedError: a manifest could not be read.
    """
    sealed = [f for f in members if f.sealed and known.get(f.entry.name, True)]
    for first in range(0, len(sealed), BATCH):
        batch = sealed[first : first + BATCH]
        asked = [f for f in batch if f.entry.name not in known]
        passed = concurrently(batch[0].root.store, _is_verified, asked)
        known |= zip((f.entry.name for f in asked), passed, strict=True)
        for found in batch:
            if known[found.entry.name]:
                return found
    return None


def verified_names(members: Sequence[ScannedEntry]) -> frozenset[str]:
    """Return the names of all members that were sealed after a content check.

    Raises:
        UnavailableError, DeniedError: a manifest could not be read.
    """
    sealed = [found for found in members if found.sealed]
    if not sealed:
        return frozenset()
    passed = concurrently(sealed[0].root.store, _is_verified, sealed)
    return frozenset(f.entry.name for f, ok in zip(sealed, passed, strict=True) if ok)


def surveyed(found: ScannedEntry) -> ScannedEntry | None:
    """Return an entry with its files listed; None if it has been removed."""
    if found.entry.contents is not None:
        return found
    try:
        files = list_entry(found.root.store, found.place)
        return with_needs(with_run(found.now(contents=sum_up(files)), files), files)
    except NotFoundError:
        return None


def _errors(checkpoint: Checkpoint) -> list[tuple[ExitCode, str]]:
    errors = [f for f in check_structure(checkpoint, NULL) if f.severity is Severity.ERROR]
    # A rank missing without an end marker may have been lost later: that is evidence to keep, not
    # proof of an abandoned save.
    lost = any(f.kind == "missing-rank" for f in errors)
    as_damage = {ExitCode.INCOMPLETE: ExitCode.CORRUPT} if lost else {}
    return [(as_damage.get(f.code, f.code), f.message) for f in errors]


def _judged(
    found: ScannedEntry, errors: Sequence[tuple[ExitCode, str]], now: float
) -> ScannedEntry:
    """Return the class of a checkpoint that does not pass."""
    by_code = dict(reversed(errors))
    if ExitCode.INCOMPLETE in by_code:
        return _unfinished(found, by_code[ExitCode.INCOMPLETE], now)
    for code, kind in _CLASSES.items():
        if code in by_code:
            return _damaged(found, kind, by_code[code], now)
    return found.now(entry_class=EntryClass.FOREIGN, why=errors[0][1])


def as_damaged(found: ScannedEntry, why: str, now: float) -> ScannedEntry:
    """Return the class of a save that lost something, as a check of its structure gives it."""
    return _damaged(found, EntryClass.CORRUPT, why, now)


def _damaged(found: ScannedEntry, kind: EntryClass, why: str, now: float) -> ScannedEntry:
    """Damage is evidence, unless the save may still be running."""
    assert found.child is not None
    if found.child.part.recognition.commit is CommitState.NO_MARKER:
        newest = _newest(found)
        if newest is None or now - newest < GRACE:
            return found.now(entry_class=EntryClass.STAGING, why=why)
    return found.now(entry_class=kind, why=why)


def _unfinished(found: ScannedEntry, why: str, now: float) -> ScannedEntry:
    newest = _newest(found)
    if newest is not None and now - newest >= GRACE:
        why = f"{why}; {GUESS}"
    return found.now(entry_class=EntryClass.STAGING, why=why, time=newest)


def _newest(found: ScannedEntry) -> float | None:
    return None if found.entry.contents is None else found.entry.contents.newest


def _is_verified(found: ScannedEntry) -> bool:
    """Whether it was sealed after a content check."""
    store, place = found.root.store, found.place
    path = f"{place.path}/{MANIFEST}" if place.kind is EntryKind.DIRECTORY else place.path + SUFFIX
    try:
        # The checks stand at the head; a long manifest is read whole only if they help.
        head = store.read(path, 0, min(_HEAD, store.stat(path).size))
        if b'"checks": []' in head:
            return False
        manifest = read(store, path)
    except (NotFoundError, CorruptError, UnsafeError, UnsupportedError):
        return False
    return any(c.level in _CONTENT and c.evidence != "none" for c in manifest.checks)


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
