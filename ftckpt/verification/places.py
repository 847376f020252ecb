"""Verify a place: one checkpoint, or a root of steps.

A statement about several checkpoints must hold for each of them, so the weakest counts: the worst
code, the lowest level, the weakest evidence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING

from ftckpt.checkpoint import Checkpoint
from ftckpt.discovery.listing import open_part
from ftckpt.discovery.recognise import UnopenedPart
from ftckpt.discovery.resolve import Target
from ftckpt.discovery.step_names import worded_step
from ftckpt.errors import (
    UNPROVEN,
    CorruptError,
    ExitCode,
    FtckptError,
    IncompleteError,
    NotFoundError,
    UnsupportedError,
    UsageError,
    worst,
)
from ftckpt.findings import Finding, Strictness, finding, listed
from ftckpt.observer import SILENT, Observer
from ftckpt.reports import IF_ANY, IF_SOME, said_as
from ftckpt.storage import StoreOptions
from ftckpt.storage.store import EntryKind, Store
from ftckpt.verification import EVIDENCE, Level, VerifyOptions, VerifyReport, failed, verify
from ftckpt.workers import ALONE, Work

if TYPE_CHECKING:
    from ftckpt.discovery.checks import Keeper
    from ftckpt.discovery.ledger import CheckedPlace, Remembered
    from ftckpt.discovery.neighbours import Lacking
    from ftckpt.discovery.roots import Child, Root

    from .scrub import Scrub, ScrubSummary

_LEVELS = (Level.AUTO, Level.STRUCTURE, Level.CONTENT, Level.VALUES)
# A larger directory is one of a large job, and not one with steps in it.
_NAMES = 4096


@dataclass(frozen=True, slots=True)
class PlaceReport(VerifyReport):
    """The verdict on a place.

    Attributes:
        url: the place, as a user would type it.
        format: of the checkpoint; None if several differ, or nothing was recognised.
        step: by its content; None if several differ, or without one.
        strict: the classes of warnings that counted as errors.
        checkpoints: the steps of a root that was checked whole, or scrubbed.
        scrub: how far a scrub has come.

    Findings of checkpoints stand in their own reports; those of a root are about its pointers.
    """

    url: str = field(default="", metadata=said_as("target"))
    format: str | None = None
    step: int | None = None
    strict: tuple[Strictness, ...] = ()
    checkpoints: tuple[PlaceReport, ...] = field(default=(), metadata=IF_SOME)
    scrub: ScrubSummary | None = field(default=None, metadata=IF_ANY)


@dataclass(frozen=True, kw_only=True)
class PlaceCheck:
    """Verifies places.

    Attributes:
        options: for each checkpoint.
        hostile: finds unsafe content in a checkpoint that no format can open.
        ledger: directory or URL of the ledger that keeps the verdicts, "" for that of the root;
            None: they are not kept.
        stores: settings for object stores.
        work: threads, rate limit and counter.
        watcher: receives events.
    """

    options: VerifyOptions
    hostile: Callable[[Store, UnopenedPart], Iterable[Finding]]
    ledger: str | None = None
    stores: StoreOptions
    work: Work = ALONE
    watcher: Observer = SILENT

    def target(
        self, target: Target, *, everything: bool = False, scrub: Scrub | None = None
    ) -> PlaceReport:
        """Verify a place: of a root without a selector, its pointers and its newest checkpoint.

        With `everything`, all checkpoints of such a root; with `scrub`, those whose turn it is.

        Raises:
            NotFoundError: no such step, or the root holds no checkpoint.
            UsageError: a scrub of one checkpoint.
            UnavailableError, DeniedError, NoResourceError: the check could not be made.
        """
        if scrub is not None and (target.root is None or target.place.which):
            raise UsageError(
                f"{target.place.url} is one checkpoint, and a scrub is of a root of several"
            )
        if target.root is None:
            assert target.part is not None

            alone = partial(_lacking_alone, target, self.stores)

            def itself() -> PlaceReport:
                assert target.part is not None
                return self._part(target.place.store, target.part, target.place.url, alone)

            below = _steps_below(target)
            if below is None:
                return itself()
            if not everything:
                names = listed([one.path for one in below.candidates], 3)
                self.watcher.warn(
                    f"{target.place.url} is a checkpoint, and holds {names}, which --all checks"
                )
                return itself()
            self.watcher.begin(target.place.url)
            mine = itself()
            reports = [mine, *(self._begun(below, child) for child in self._counted(below))]
            pointed = self._pointed(below)
            return _joined(reports, target.place.url, _verdict(reports, pointed), pointed)
        if target.place.which:
            from ftckpt.discovery.candidates import choose_child

            child = choose_child(target.root, target.place.which, self.watcher.warn)
            return self._child(target.root, child)
        if scrub is not None:
            return self._scrub(target.root, target.place.url, scrub)
        return self._root(target.root, target.place.url, everything=everything)

    def checkpoint(self, checkpoint: Checkpoint) -> PlaceReport:
        """Verify an opened checkpoint.

        Raises:
            UnavailableError, DeniedError, NoResourceError: the check could not be made.
        """
        keeper, part = None, None
        if self.ledger is not None:
            from ftckpt.discovery.ledger import CheckedPlace

            opened = CheckedPlace(checkpoint.source.store, checkpoint=checkpoint)
            keeper, part = self._keeper(opened, None)
        return self._checked(checkpoint, keeper, part)

    def _checked(
        self, checkpoint: Checkpoint, keeper: Keeper | None, part: CheckedPlace | None
    ) -> PlaceReport:
        emit = self.watcher.found
        if keeper is None or part is None:
            report = verify(checkpoint, self.options, work=self.work, emit=emit)
        else:
            report = keeper.check(checkpoint, part, self.work, emit)
        made = self._placed(report, checkpoint.source.url, checkpoint.format, checkpoint.known_step)
        self.watcher.end(made)
        return made

    def _placed(
        self, report: VerifyReport, url: str, name: str | None = None, step: int | None = None
    ) -> PlaceReport:
        values = {one.name: getattr(report, one.name) for one in fields(VerifyReport)}
        return PlaceReport(**values, url=url, format=name, step=step, strict=self.strict)

    @property
    def strict(self) -> tuple[Strictness, ...]:
        """The classes of warnings that count as errors."""
        return tuple(sorted(self.options.strict))

    def _keeper(self, part: CheckedPlace, root: Root | None) -> tuple[Keeper, CheckedPlace]:
        """Return what keeps the verdict on a checkpoint in the ledger of its root."""
        from ftckpt.discovery.checks import Keeper
        from ftckpt.discovery.ledger import Ledger

        if root is not None:
            ledger, before = Ledger.of_root(root, self.ledger or "", self.stores)
            part = part._replace(known_as=f"{before}{part.place}")
        else:
            ledger, place = Ledger.around(part.store, part.place, self.ledger or "", self.stores)
            part = part._replace(known_as=place)
        return Keeper(ledger, self.options, self.watcher.warn), part

    def unopened(self, error: FtckptError, url: str) -> PlaceReport:
        """Return the report on a place where nothing can be opened."""
        return self._failed(error, (), url, None, time.monotonic())

    def _root(self, root: Root, url: str, *, everything: bool) -> PlaceReport:
        from ftckpt.discovery.candidates import newest_child
        from ftckpt.discovery.roots import has_gone

        pointed = self._pointed(root)
        if everything:
            chosen = self._counted(root)
        else:
            chosen = [newest_child(root, self.watcher.warn, over_finished=False)]
        reports = []
        for child in chosen:
            report = self._begun(root, child)
            if everything and report.code is not ExitCode.OK and has_gone(root, child.candidate):
                self.watcher.warn(f"{report.url} was removed meanwhile, and was passed over")
                continue
            reports.append(report)
        if not reports:
            raise NotFoundError(f"{url} holds no checkpoint any more")
        verdict = _verdict(reports, pointed)
        if everything:
            return _joined(reports, url, verdict, pointed)
        code, message, hint = verdict
        return _replaced(reports[0], code=code, message=message, hint=hint, pointed=pointed)

    def _counted(self, root: Root) -> list[Child]:
        """Return the checkpoints of a root, and what else in it is hostile."""
        from ftckpt.discovery.roots import saves_among

        children = root.children()
        counted = saves_among(children)
        for child in children:
            if child in counted:
                continue
            if any(self.hostile(root.store, child.part)):
                counted.append(child)
            else:
                where, why = root.url_of(child.candidate), child.part.recognition.reason
                self.watcher.warn(
                    f"{where} was passed over, because it does not count as a save: {why}"
                )
        return counted

    def _scrub(self, root: Root, url: str, scrub: Scrub) -> PlaceReport:
        from ftckpt.discovery.roots import has_gone

        pointed = self._pointed(root)
        reports = []
        for child in scrub.turns(root):
            report = self._begun(root, child)
            if report.code is not ExitCode.OK and has_gone(root, child.candidate):
                self.watcher.warn(f"{report.url} was removed meanwhile, and was passed over")
                scrub.gone(child)
                continue
            scrub.done(child, report)
            reports.append(report)
        for name in scrub.passed_over:
            self.watcher.warn(f"{name} is not committed, and was passed over")
        if not reports:
            raise NotFoundError(f"{url} holds no committed checkpoint")
        for child, known in scrub.remembered():
            report = replace(_remembered(root.url_of(child.candidate), known), strict=self.strict)
            self.watcher.begin(report.url)
            self.watcher.end(report)
            reports.append(report)
        verdict = _verdict(reports, pointed)
        return replace(_joined(reports, url, verdict, pointed), scrub=scrub.summary(root))

    def _pointed(self, root: Root) -> list[Finding]:
        """Return the pointers of a root that point to nothing."""
        pointed = [
            finding(
                "pointer-dangling",
                f"{p.name} points to {p.says}, and that is not there",
                file=p.name,
            )
            for p in root.pointers
            if p.dangling
        ]
        for one in pointed:
            self.watcher.found(one)
        return pointed

    def _begun(self, root: Root, child: Child) -> PlaceReport:
        self.watcher.begin(root.url_of(child.candidate))
        return self._child(root, child)

    def _child(self, root: Root, child: Child) -> PlaceReport:
        """Check one step."""

        def beside(checkpoint: Checkpoint) -> Lacking | None:
            from ftckpt.discovery.fewer_files import lacking_when_open  # most have no parts

            step = child.candidate.step
            return lacking_when_open(root, child, step, root.candidates, checkpoint)

        url = root.store.describe(child.part.entry.path)
        return self._part(root.store, child.part, url, beside, root)

    def _part(
        self,
        store: Store,
        part: UnopenedPart,
        url: str,
        lacks: Callable[[Checkpoint], Lacking | None],
        root: Root | None = None,
    ) -> PlaceReport:
        began = time.monotonic()
        self.watcher.open(url, part.format.name)
        keeper, held, before = None, None, ""
        if self.ledger is not None:
            from ftckpt.discovery.ledger import CheckedPlace

            keeper, held = self._keeper(CheckedPlace(store, part), root)
            before = keeper.begin(held)
        try:
            checkpoint = open_part(store, part)
        except FtckptError as error:
            if root is None and not store.traits.local:
                _require_standing(url, self.stores, error)
            # Unreadable content may still be hostile, and that verdict wins.
            more = self.hostile(store, part) if isinstance(error, UnsupportedError) else ()
            report = self._failed(error, more, url, part.format.name, began)
            if keeper is not None and held is not None:
                keeper.end(held, before, report)
            return report
        self.watcher.open(checkpoint.source.url, checkpoint.format)
        if (lost := lacks(checkpoint)) is not None:
            lost.noted_in(checkpoint)
        return self._checked(checkpoint, keeper, held)

    def _failed(
        self,
        error: FtckptError,
        more: Iterable[Finding],
        url: str,
        name: str | None,
        began: float,
    ) -> PlaceReport:
        report = failed(error, more, seconds=time.monotonic() - began)
        for one in report.findings:
            self.watcher.found(one)
        made = self._placed(report, url, name)
        self.watcher.end(made)
        return made


def _require_standing(url: str, stores: StoreOptions, error: FtckptError) -> None:
    """Refuse what gc has dropped: that it lacks its marker does not mean damage.

    Raises:
        NotFoundError: it was dropped, and its root says so.
    """
    if isinstance(error, (CorruptError, IncompleteError)):
        from ftckpt.discovery.dropped import dropped_instead

        dropped = dropped_instead(url, stores)
        if dropped is not None:
            raise dropped from error


def _lacking_alone(target: Target, stores: StoreOptions, checkpoint: Checkpoint) -> Lacking | None:
    from ftckpt.discovery.fewer_files import lacking_alone  # most have no parts

    assert target.part is not None
    return lacking_alone(target.place.url, target.part, checkpoint, target.formats, stores)


def _steps_below(target: Target) -> Root | None:
    """Return a checkpoint as a root, if a trainer keeps its steps in it, below the final model."""
    place = target.place
    if place.entry.kind is not EntryKind.DIRECTORY:
        return None
    names = place.store.names(place.entry.path, _NAMES)
    if not any(
        kind is EntryKind.DIRECTORY and worded_step(name) is not None
        for name, kind in names.items()
    ):
        return None
    from ftckpt.discovery.resolve import open_root

    try:
        return open_root(place, target.formats)
    except UsageError:
        return None


def _verdict(
    reports: Sequence[PlaceReport], pointed: Sequence[Finding]
) -> tuple[ExitCode, str, str]:
    """Return code, message and hint of several checkpoints and their root's pointers."""
    code = worst([one.code for one in reports] + [ExitCode.CORRUPT for _ in pointed])
    bad = [one for one in reports if one.code is not ExitCode.OK]
    message, hint = reports[0].message, reports[0].hint
    if pointed and not bad:
        message, hint = pointed[0].message, "point it to a checkpoint that is there"
    elif len(reports) == 1:
        code = reports[0].code
    elif code is ExitCode.OK:
        warned = sum(bool(one.hint) for one in reports)
        more = f", {warned} of them with warnings" if warned else ""
        message, hint = f"{len(reports)} checkpoints passed{more}", ""
    else:
        hints = {one.hint for one in bad}
        message, hint = _of_several(reports), hints.pop() if len(hints) == 1 else ""
    return code, message, hint


def _of_several(reports: Sequence[PlaceReport]) -> str:
    """Return how many did not pass, and which is the first: what cannot be proven is not bad."""
    bad = [one for one in reports if one.code not in (ExitCode.OK, *UNPROVEN)]
    unproven = [one for one in reports if one.code in UNPROVEN]
    if not bad:
        first = unproven[0].url
        return f"{len(unproven)} of {len(reports)} checkpoints are not proven: {first} first"
    more = f", and {len(unproven)} are not proven" if unproven else ""
    return f"{len(bad)} of {len(reports)} checkpoints failed: {bad[0].url} first{more}"


def _remembered(url: str, known: Remembered) -> PlaceReport:
    """Return the verdict of an earlier run on a checkpoint that this run did not read."""
    day = time.strftime("%Y-%m-%d", time.gmtime(known.verdict.checked))
    return PlaceReport(
        level=Level.STRUCTURE,
        evidence="none",
        code=ExitCode(known.verdict.code),
        message=f"{known.verdict.reason} (read on {day}, and unchanged since)",
        hint="",
        findings=(),
        bytes_read=0,
        bytes_covered=0,
        bytes_uncovered=0,
        sampled=None,
        seconds=0.0,
        url=url,
    )


def _replaced(
    report: PlaceReport, *, code: ExitCode, message: str, hint: str, pointed: Sequence[Finding]
) -> PlaceReport:
    """Return the report on the newest checkpoint of a root, with its pointers' findings."""
    values = {one.name: getattr(report, one.name) for one in fields(PlaceReport)}
    values |= {"code": code, "message": message, "hint": hint}
    return PlaceReport(**values | {"findings": (*pointed, *report.findings)})


def _joined(
    reports: Sequence[PlaceReport],
    url: str,
    verdict: tuple[ExitCode, str, str],
    found: Sequence[Finding],
) -> PlaceReport:
    """Combine the reports of a root's checkpoints."""
    formats = {one.format for one in reports}
    steps = {one.step for one in reports}
    shares = [one.sampled for one in reports if one.sampled is not None]
    code, message, hint = verdict
    return PlaceReport(
        level=min((one.level for one in reports), key=_LEVELS.index),
        evidence=min((one.evidence for one in reports), key=EVIDENCE.index),
        code=code,
        message=message,
        hint=hint,
        findings=tuple(found),
        bytes_read=sum(one.bytes_read for one in reports),
        bytes_covered=sum(one.bytes_covered for one in reports),
        bytes_uncovered=sum(one.bytes_uncovered for one in reports),
        sampled=min(shares, default=None),
        seconds=sum(one.seconds for one in reports),
        url=url,
        format=formats.pop() if len(formats) == 1 else None,
        step=steps.pop() if len(steps) == 1 else None,
        strict=reports[0].strict,
        checkpoints=tuple(reports),
    )
