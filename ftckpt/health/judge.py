"""Judge a survey: age of the newest save, regularity, write durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import ClassVar

from ftckpt.discovery.step_names import is_put_aside
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.reports import UNSAID, said_as
from ftckpt.retention.scan.classify import PENDING
from ftckpt.retention.scan.entries import EntryClass, ScanDepth

from .alerts import Alert, Facts, Scrubbed, alerts, scrubbed
from .alerts import Thresholds as Thresholds
from .cadence import Cadence, cadence
from .survey import Durable, Survey, SurveyedEntry, durable

# A save that lacks something and was not written to for so long is not under way.
_SILENT_S = 3600.0
# The newest saves that say how long writing takes now, and those before them that say what was
# usual: few enough that a change shows within an hour or two, many enough that one slow save is
# no change.
_NOW = 5
_BEFORE = 50

# Clocks of a store and of this machine differ by so much without anybody noticing.
_SKEW_S = 300.0


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How regularly a run is saved; None where the times do not say.

    Attributes:
        median_s: seconds between neighbouring saves, of the middle one.
        last_s: between the last two.
        jitter_s: median distance of the intervals from `median_s`.
        every_steps: median steps between neighbours.
        expected_s: what the user expects.
        reason: why times say nothing, where they do not.
    """

    median_s: float | None
    last_s: float | None
    jitter_s: float | None
    every_steps: float | None
    expected_s: float | None
    reason: str

    @property
    def interval_s(self) -> float | None:
        """What the age of the newest save is held against."""
        return self.median_s if self.expected_s is None else self.expected_s


@dataclass(frozen=True, slots=True)
class Writing:
    """Seconds from the first file of a save to its last; None where it is not known.

    Attributes:
        last_s: of the newest save.
        now_s: median of the newest few.
        before_s: median of those before them.
    """

    last_s: float | None
    now_s: float | None
    before_s: float | None


@dataclass(frozen=True, slots=True)
class Health:
    """One run.

    Attributes:
        survey: what lies there.
        newest: the committed save that `latest` names, the first of its files where several make
            one; None where there is none, or none is known to be (`Survey.doubt`).
        last: the committed save that was written last: another one after a restart from an earlier
            step.
        age_s: seconds since `last` was written; None where the store keeps no times, or where they
            lie in the future.
        verified_age_s: seconds since the newest verified save was written.
        rhythm: how regular saves are.
        writing: how long they take.
        growth: bytes a day that saves add while none is dropped; None where it is not known.
        nbytes: bytes by class.
        counts: entries by class.
        thinned: those that hold weights alone, because gc has thinned them.
        durable: what a second tier holds; None where none was named.
        scrubbed: what is remembered of the content; None for nothing.
        alerts: what somebody should look at, the worst first.
    """

    SAID: ClassVar = {
        "root": "survey.url", "newest_with": "newest_with", "doubt": "doubt",
        "verified": "survey.verified", "thinned": "weights_alone", "leftovers": "leftovers",
        "free": "survey.free", "saves": "survey.held",
    }  # fmt: skip

    survey: Survey = field(metadata=UNSAID)
    newest: SurveyedEntry | None
    last: SurveyedEntry | None
    age_s: float | None
    verified_age_s: float | None
    rhythm: Rhythm = field(metadata=said_as("interval"))
    writing: Writing
    growth: float | None = field(metadata=said_as("growth_bytes_per_day"))
    nbytes: Mapping[EntryClass, int] = field(metadata=said_as("bytes"))
    counts: Mapping[EntryClass, int]
    thinned: tuple[SurveyedEntry, ...] = field(metadata=UNSAID)
    durable: Durable | None = field(metadata=said_as("tier"))
    scrubbed: Scrubbed | None = field(metadata=said_as("scrub"))
    alerts: tuple[Alert, ...]

    @property
    def doubt(self) -> str:
        """Say why no save is known to be the newest, or why it is not known to be good."""
        return self.survey.unread if self.newest is not None else self.survey.doubt

    @property
    def doubt_said(self) -> str:
        """Say in a sentence what the doubt is about."""
        if self.newest is not None:
            return f"the newest save is not known to be good: {self.doubt}"
        return f"cannot tell which save is the newest: {self.doubt}"

    @property
    def newest_with(self) -> tuple[str, ...]:
        """Return the names of the other files that make the newest save."""
        return (self.survey.order or ())[1 : self.survey.together]

    @property
    def weights_alone(self) -> int:
        """Return how many hold weights alone."""
        return len(self.thinned)

    @property
    def leftovers(self) -> tuple[str, ...]:
        """Return what killed runs of ftckpt have left: files, records of parts, uploads."""
        return self.survey.leftovers + self.survey.dead_parts + self.survey.uploads


@dataclass(frozen=True, slots=True)
class Status:
    """A place of one run or several.

    Attributes:
        url: as the user typed it.
        now: when it was looked at, in seconds since the epoch.
        runs: one a run.
        guard: the last decision of the root's guard; None without one.
    """

    SAID: ClassVar = ("alerts",)

    url: str = field(metadata=UNSAID)
    now: float
    runs: tuple[Health, ...]
    guard: Mapping[str, object] | None = None

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Return the alerts of all runs."""
        return tuple(alert for run in self.runs for alert in run.alerts)

    @property
    def doubt(self) -> str:
        """Say why the newest save of a run is not known, or not read; "" where it is both."""
        return next((run.doubt for run in self.runs if run.doubt), "")

    @property
    def code(self) -> ExitCode:
        """Return PARTIAL where there is something to look at, UNVERIFIED where there is a doubt."""
        if self.alerts:
            return ExitCode.PARTIAL
        return ExitCode.UNVERIFIED if self.doubt else ExitCode.OK

    @property
    def message(self) -> str:
        """Say in one sentence what is to be looked at."""
        if not self.alerts:
            if self.doubt:
                return next(run.doubt_said for run in self.runs if run.doubt)
            return f"{counted(len(self.runs), 'run')}, nothing to look at"
        first, *rest = self.alerts
        return f"{first.kind}: {first.message}" + (f" (and {len(rest)} more)" if rest else "")

    @property
    def hint(self) -> str:
        """Say what to do about it."""
        return self.alerts[0].hint if self.alerts else ""


def judge(
    url: str,
    surveys: Sequence[Survey],
    now: float,
    thresholds: Thresholds,
    tiers: Mapping[str, Survey] | None = None,
) -> Status:
    """Say how the runs of a place are doing; pure.

    Args:
        url: of the place.
        surveys: one a run.
        now: seconds since the epoch.
        thresholds: what is worth an alert.
        tiers: the second tier of a run, by the run's URL.
    """
    tiers = tiers or {}
    runs = tuple(_health(one, now, thresholds, tiers.get(one.url)) for one in surveys)
    return Status(url, now, runs)


def _health(survey: Survey, now: float, wanted: Thresholds, second: Survey | None) -> Health:
    committed = survey.of(EntryClass.COMMITTED)
    # No run goes on from weights alone, and their files say when gc thinned them.
    committed = tuple(
        h
        for h in committed
        if not h.entry.thinned and not is_put_aside(h.entry.name.rpartition("/")[2])
    )
    if survey.order is None:
        stepped = [h for h in committed if h.entry.step is not None]
        newest = max(stepped, key=lambda h: h.entry.age_order, default=None)
    else:  # as `latest` has it
        by_name = {h.entry.name: h for h in committed}
        newest = next((by_name[name] for name in survey.order if name in by_name), None)
    timed = [h for h in committed if h.finished is not None]
    last = max(timed, key=_finished, default=newest)
    age = _age(last, now)
    rhythm, growth = _rhythm(survey, committed, wanted.expected_s)
    held = None if second is None else durable(survey, second)
    writing = _writing(timed)
    scrub = None
    if survey.scrub is not None:
        scrub = scrubbed(survey.scrub, {h.url: h.finished for h in survey.held}, now)
    facts = Facts(
        last=last,
        age_s=age,
        ahead_s=_ahead(last, now),
        interval_s=rhythm.interval_s,
        writing_now_s=writing.now_s,
        writing_before_s=writing.before_s,
        unfinished=_after(survey, last),
        abandoned=tuple(h for h in survey.of(EntryClass.ABANDONED) if not _is_pending(h)),
        corrupt=_news(survey.of(EntryClass.CORRUPT), scrub),
        unsafe=_news(survey.of(EntryClass.UNSAFE), scrub),
        torn=_torn(survey, now, rhythm.interval_s),
        dangling=survey.dangling,
        durable=held,
        durable_age_s=_age(held.newest, now) if held is not None else None,
        free=survey.free,
        next_bytes=newest.entry.contents.nbytes if newest and newest.entry.contents else None,
        scrubbed=scrub,
    )
    return Health(
        survey,
        newest,
        last,
        age,
        _age(survey.verified, now),
        rhythm,
        writing,
        growth,
        survey.nbytes(),
        {c: len(survey.of(c)) for c in EntryClass if survey.of(c)},
        tuple(h for h in survey.of(EntryClass.COMMITTED) if h.entry.thinned),
        held,
        scrub,
        alerts(facts, wanted),
    )


def _news(held: Sequence[SurveyedEntry], scrub: Scrubbed | None) -> tuple[SurveyedEntry, ...]:
    """Return those of which no remembered verdict tells."""
    told = {one.path for one in scrub.bad} if scrub is not None else set()
    return tuple(one for one in held if one.url not in told)


def _torn(survey: Survey, now: float, interval: float | None) -> SurveyedEntry | None:
    """Return a save after the last whole one that lacks something and that nobody goes on with.

    It may lack so much that no format knows it, while its name says a later step.
    """
    wait = max(_SILENT_S, interval or 0.0)
    for held in survey.of(EntryClass.STAGING):
        opened = held.entry.looked is ScanDepth.STRUCTURE
        if opened and held.finished is not None and now - held.finished > wait:
            return held
    for held in survey.of(EntryClass.COMMITTED):
        if held.entry.name in survey.halves and (
            held.finished is None or now - held.finished > wait
        ):
            why = "the other files of its save are not there, or cannot be read"
            return replace(held, entry=replace(held.entry, why=why))
    top = max((h.entry.step or 0 for h in survey.of(EntryClass.COMMITTED)), default=None)
    for held in survey.of(EntryClass.FOREIGN):
        step, time = held.entry.step, held.entry.time
        above = top is not None and step is not None and step > top
        if above and (time is None or now - time > wait):
            return held
    return None


def _finished(held: SurveyedEntry) -> float:
    assert held.finished is not None
    return held.finished


def _age(held: SurveyedEntry | None, now: float) -> float | None:
    if held is None or held.finished is None or _ahead(held, now) is not None:
        return None
    return max(0.0, now - held.finished)


def _ahead(held: SurveyedEntry | None, now: float) -> float | None:
    """Return how far in the future a save was written; None where it was not."""
    if held is None or held.finished is None or held.finished <= now + _SKEW_S:
        return None
    return held.finished - now


def _rhythm(
    survey: Survey, committed: Sequence[SurveyedEntry], expected: float | None
) -> tuple[Rhythm, float | None]:
    """Return how regular saves are, and how many bytes a day they add."""
    saves = [save for save in (h.save for h in committed) if save is not None]
    reason = "" if committed else "no save is finished"
    if survey.together > 1:
        reason = "several files are one save"
    elif survey.doubt:
        reason = "the order of the saves is not known"
    elif not saves:
        reason = reason or "no save says its step"
    if reason:
        return Rhythm(None, None, None, None, expected, reason), None
    known: Cadence = cadence(saves, survey.url)
    if known.every_s is None:
        return Rhythm(None, None, None, known.every_steps, expected, known.reason), None
    times = [save.finished for save in known.saves if save.finished is not None]
    gaps = [b - a for a, b in pairwise(times)]
    jitter = median(abs(gap - known.every_s) for gap in gaps)
    size = median(save.nbytes for save in known.saves)
    rhythm = Rhythm(known.every_s, gaps[-1], jitter, known.every_steps, expected, "")
    return rhythm, size * 86400 / known.every_s


def _writing(timed: Sequence[SurveyedEntry]) -> Writing:
    saves = [h.save for h in sorted(timed, key=_finished)]
    took = [s.write_s for s in saves if s is not None and s.write_s is not None]
    now, before = took[-_NOW:], took[:-_NOW][-_BEFORE:]
    return Writing(
        took[-1] if took else None,
        median(now) if now else None,
        median(before) if len(before) >= _NOW else None,
    )


def _after(survey: Survey, last: SurveyedEntry | None) -> tuple[SurveyedEntry, ...]:
    """Return what was begun after the last save that was finished, and was not finished."""
    held = survey.of(EntryClass.STAGING, EntryClass.ABANDONED)
    begun = tuple(h for h in held if not _is_pending(h))
    if last is None or last.finished is None:
        return begun
    return tuple(h for h in begun if h.finished is not None and h.finished > last.finished)


def _is_pending(held: SurveyedEntry) -> bool:
    """Say whether an entry is the weights of one that stands whole: no save of a trainer's."""
    return held.entry.why.startswith(PENDING)
