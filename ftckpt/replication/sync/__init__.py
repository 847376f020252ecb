"""Ship the checkpoints of a root to another tier: those that it lacks, the oldest gap first."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from ftckpt.discovery.roots import Root
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    IncompleteError,
    NotFoundError,
    RefusedError,
    UnsafeError,
    UnsupportedError,
    worst,
)
from ftckpt.replication.copy import CopyReport, copy
from ftckpt.replication.options import ReplicationOptions
from ftckpt.reports import UNSAID, said_as
from ftckpt.retention.apply.check import surveyed
from ftckpt.retention.locks.remote import leased
from ftckpt.retention.policy import Policy
from ftckpt.retention.scan.classify import judged_by
from ftckpt.retention.scan.entries import EntryClass
from ftckpt.retention.scan.entry import ScannedEntry, ScanOptions
from ftckpt.retention.scan.read import read_entries
from ftckpt.storage import StoreOptions
from ftckpt.storage.local.atomic import make_directories
from ftckpt.storage.local.oserror import translate

from .missing import DestinationTier, chosen, dropped_from, locked, name_in, opened

# One checkpoint fails of these, and the next may be shipped all the same.
# What is not shipped, and the code that says so.
_BAD = {EntryClass.CORRUPT: ExitCode.CORRUPT, EntryClass.UNSAFE: ExitCode.UNSAFE}
_OF_ONE = (
    CorruptError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    UnsafeError,
    UnsupportedError,
)


class SyncState(StrEnum):
    """What became of one checkpoint.

    SHIPPED: copied, proven and visible.
    THERE: the same checkpoint stood there before.
    PLANNED: it would be shipped (a dry run).
    DROPPED: the tier's own gc has dropped it since it was saved.
    UNFINISHED: its save is not committed.
    GONE: it was removed from the source meanwhile.
    FAILED: see its code.
    """

    SHIPPED = "shipped"
    THERE = "there"
    PLANNED = "planned"
    DROPPED = "dropped"
    UNFINISHED = "unfinished"
    GONE = "gone"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SyncItem:
    """One checkpoint of the source.

    Attributes:
        name: relative to its root.
        step: by its name or content.
        state: what became of it.
        why: which rule chose it, or what went wrong.
        code: exit code of a failure, else OK.
        nbytes: bytes of its files.
        report: of the copy, where one was made.
    """

    SAID: ClassVar = ("destination", "evidence")

    name: str
    step: int | None
    state: SyncState
    why: str = ""
    code: ExitCode = ExitCode.OK
    nbytes: int = field(default=0, metadata=said_as("bytes"))
    report: CopyReport | None = field(default=None, metadata=UNSAID)

    @property
    def destination(self) -> str | None:
        """Where the copy stands."""
        return None if self.report is None else self.report.url

    @property
    def evidence(self) -> str | None:
        """What the bytes of the source were held to."""
        return None if self.report is None else self.report.evidence


@dataclass(frozen=True)
class SyncReport:
    """What a sync did.

    Attributes:
        source: the root.
        destination: the tier.
        items: what was chosen, and what is not finished, by ascending step.
        seconds: how long it took.
    """

    SAID: ClassVar = ("shipped", "bytes", "missing", "newest")

    source: str = field(metadata=UNSAID)
    destination: str = field(metadata=UNSAID)
    items: tuple[SyncItem, ...]
    seconds: float

    def of(self, *states: SyncState) -> tuple[SyncItem, ...]:
        """Return the items of some states."""
        return tuple(item for item in self.items if item.state in states)

    @property
    def shipped(self) -> int:
        """Number of checkpoints that were copied."""
        return len(self.of(SyncState.SHIPPED))

    @property
    def bytes(self) -> int:
        """Bytes of them."""
        return sum(item.nbytes for item in self.of(SyncState.SHIPPED))

    @property
    def missing(self) -> int:
        """Number of those that the tier lacks."""
        return len(self.of(SyncState.PLANNED, SyncState.FAILED))

    @property
    def newest(self) -> int | None:
        """The highest step on the tier."""
        held = self.of(SyncState.SHIPPED, SyncState.THERE)
        return max((item.step for item in held if item.step is not None), default=None)

    @property
    def code(self) -> ExitCode:
        """The worst of the failures."""
        return worst(item.code for item in self.items)


@dataclass(frozen=True)
class SyncOptions:
    """How a tier is brought up to date.

    Attributes:
        policy: whose keep rules choose; None for every checkpoint.
        replication: how each copy is made.
        stores: how to reach object stores.
        dry_run: only say what would be done.
        again: ship also what the tier's own gc has dropped.
        actor: who, for the lock.
    """

    policy: Policy | None
    replication: ReplicationOptions
    stores: StoreOptions
    dry_run: bool = False
    again: bool = False
    actor: str = ""


def sync(
    root: Root,
    tier: Root,
    how: ScanOptions,
    options: SyncOptions,
    *,
    told: Callable[[SyncItem], None] = lambda _: None,
    remark: Callable[[str], None] = lambda _: None,
) -> SyncReport:
    """Ship what the rules choose and the tier lacks; nothing is removed on either side.

    A checkpoint that cannot be shipped is named, and does not hold up the others. Killed at any
    instant, the same call goes on where it was.

    Args:
        root: the source.
        tier: the destination, which may be empty.
        how: formats, and what a checkpoint depends on.
        options: which, and how.
        told: called with each item as it is decided.
        remark: called with other remarks, one line each.

    Raises:
        RefusedError: another sync holds the tier, or has taken it.
        NoResourceError, DeniedError, UnavailableError: a side could not be read or written.
    """
    began = time.monotonic()
    work = _Sync(root, tier, how, options, told)
    if options.dry_run:
        work.run(lambda: None)
    else:
        with locked(tier, options.actor, remark) as check:
            work.run(check)
    order = sorted(work.items.values(), key=lambda i: (-1 if i.step is None else i.step, i.name))
    return SyncReport(root.url, tier.url or tier.store.url, tuple(order), time.monotonic() - began)


class _Sync:
    """One sync at work."""

    def __init__(
        self,
        root: Root,
        tier: Root,
        how: ScanOptions,
        options: SyncOptions,
        told: Callable[[SyncItem], None],
    ) -> None:
        self.root, self.options = root, options
        self.tier = DestinationTier(root, tier, options.replication, options.stores)
        self.told = told
        self.items: dict[str, SyncItem] = {}
        self.members: dict[str, ScannedEntry] = {}
        for found in read_entries(root, how, counter=options.replication.work.counter):
            name = name_in(root, found)
            if found.entry.entry_class is EntryClass.COMMITTED:
                found = judged_by(found, how)
            self.members[name] = found
        self.dropped = {} if options.again else dropped_from(tier)

    def run(self, check: Callable[[], None]) -> None:
        for name, found in self.members.items():
            if found.entry.entry_class in (EntryClass.STAGING, EntryClass.ABANDONED):
                self._tell(self._item(name, SyncState.UNFINISHED, found.entry.why))
            elif found.entry.entry_class in _BAD and self._in_question(found):
                code = _BAD[found.entry.entry_class]
                self._tell(self._item(name, SyncState.FAILED, found.entry.why, code))
        # What fails makes room for the next that the rules choose.
        while waiting := [(n, w) for n, w in self._chosen() if n not in self.items]:
            name, why = waiting[0]
            check()
            self._tell(self._ship(name, why))

    def _tell(self, item: SyncItem) -> None:
        self.items[item.name] = item
        self.told(item)

    def _item(
        self, name: str, state: SyncState, why: str, code: ExitCode = ExitCode.OK
    ) -> SyncItem:
        found = self.members[name].entry
        return SyncItem(name, found.step, state, why, code)

    def _in_question(self, found: ScannedEntry) -> bool:
        """Say whether a damaged one would be chosen were it whole."""
        return any(found.entry.name == name for name, _ in self._chosen(also=found))

    def _chosen(self, also: ScannedEntry | None = None) -> list[tuple[str, str]]:
        """Return what the rules choose of what can be shipped, and of `also`; see `chosen`."""
        failed = (SyncState.FAILED, SyncState.GONE)
        good = {
            name: found
            for name, found in self.members.items()
            if found is also
            or (
                found.entry.entry_class is EntryClass.COMMITTED
                and (name not in self.items or self.items[name].state not in failed)
            )
        }
        return chosen(good, self.options.policy)

    def _ship(self, name: str, why: str) -> SyncItem:
        found = surveyed(self.members[name])
        if found is None:
            return self._item(name, SyncState.GONE, "it was removed meanwhile")
        assert found.entry.contents is not None
        self.members[name] = found
        ships = not self.options.dry_run
        item = replace(self._item(name, SyncState.PLANNED, why), nbytes=found.entry.contents.nbytes)
        dropped = self.dropped.get(name)
        old = found.entry.time is None or dropped is None or found.entry.time < dropped
        if dropped is not None and old and not self.tier.stands(found):
            return replace(item, state=SyncState.DROPPED, why="gc of the tier has dropped it")
        try:
            unswept = ships and self.tier.left_behind(found)
            if found.entry.thinned and (said := self.tier.has_of(found, record=ships)):
                return replace(item, state=SyncState.THERE, why=said)
            if not unswept and self.tier.is_there(found, record=ships):
                return replace(item, state=SyncState.THERE)
            if not ships:
                return item
            with leased(self.root, name, self.options.actor):
                report = self._copy(found)
        except _OF_ONE as error:
            if surveyed(found.now(contents=None)) is None:
                return replace(item, state=SyncState.GONE, why="it was removed meanwhile")
            return replace(item, state=SyncState.FAILED, why=error.message, code=error.exit_code)
        self.tier.remember(found)
        state = SyncState.THERE if report.already_there else SyncState.SHIPPED
        return replace(item, state=state, report=report)

    def _copy(self, found: ScannedEntry) -> CopyReport:
        checkpoint = opened(self.root, found)
        target = self.tier.target(found)
        local = self.tier.local_path(found)
        if local is not None:  # a step may hold its one checkpoint in a folder
            try:
                make_directories(os.path.dirname(local))
            except OSError as error:
                raise translate(error, target, "write") from error
        return copy(
            checkpoint,
            target,
            options=self.options.replication,
            stores=self.options.stores,
        )
