"""Decide which parts of a run's state need a person.

What is remembered of the content of a run's saves, and what has waited longest to be read.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ftckpt.amounts import shown_duration
from ftckpt.findings import counted, listed
from ftckpt.own_files import GO_ON, is_under_way
from ftckpt.retention.scan.entries import EntryClass
from ftckpt.verification.scrub import ScrubHistory, failure, is_blind

from .survey import Durable, SurveyedEntry


class BadSave(NamedTuple):
    """A save that was found bad.

    Attributes:
        path: or URL.
        code: the exit code of the check.
        message: what is wrong, in a sentence.
    """

    path: str
    code: int
    message: str


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """How far the reading of a run has come.

    Attributes:
        ledger: path or URL of the verdicts.
        saves: number of committed saves.
        read: number of them whose content was read as it is now, and held to evidence.
        longest: path or URL of the save that waits for longest; "" without a save.
        unread_s: seconds since it was read, or since it was written if it never was; None if the
            store keeps no times.
        bad: the saves that were found bad and are unchanged.
        unproven: the saves whose content no evidence covers, or that hold what is not understood: a
            scrub can open them, and no more.
    """

    ledger: str
    saves: int
    read: int
    longest: str
    unread_s: float | None
    bad: tuple[BadSave, ...]
    unproven: tuple[str, ...] = ()


def scrubbed(history: ScrubHistory, written: Mapping[str, float | None], now: float) -> Scrubbed:
    """Say how far the reading of a run has come; pure.

    Args:
        history: what is remembered.
        written: when each save was written, in seconds since the epoch, by its path or URL.
        now: seconds since the epoch.
    """
    failed = {url: one for url, k in history.checks.items() if (one := failure(k)) is not None}
    blind = tuple(url for url, k in history.checks.items() if is_blind(k))
    waits: dict[str, float | None] = {}
    for url, known in history.checks.items():
        since = written.get(url)
        if known.last is not None and url not in blind:
            since = known.last.verdict.checked
        waits[url] = None if since is None else max(0.0, now - since)
    # What nobody knows the age of may have waited for ever.
    longest = max(waits, key=lambda url: _or_ever(waits[url]), default="")
    read = sum(known.last is not None and url not in blind for url, known in history.checks.items())
    bad = tuple(
        BadSave(url, one.verdict.code, one.verdict.reason)
        for url, one in failed.items()
        if url not in blind
    )
    return Scrubbed(
        history.ledger, len(history.checks), read, longest, waits.get(longest), bad, blind
    )


def _or_ever(seconds: float | None) -> float:
    return float("inf") if seconds is None else seconds


# A save that takes longer than usual by less than this is not worth a look, whatever the ratio.
_SLOWER_S = 1.0
_PILE = 2
_SCRUB = "ftckpt scrub ROOT --budget 1h, every night"
_BLIND = ": no evidence covers its content, so that a scrub cannot verify it"
_SEAL = "ftckpt seal records evidence, after each save"
_ABANDONED = 3


class AlertKind(StrEnum):
    """What is wrong. Each is a word that scripts and monitors may match."""

    EMPTY = "empty"
    STALE = "stale"
    CLOCK = "clock"
    CORRUPT = "corrupt"
    UNFINISHED = "unfinished"
    NOT_DURABLE = "not-durable"
    SLOW = "slow"
    POINTER = "pointer"
    SPACE = "space"
    UNREAD = "unread"


class Alert(NamedTuple):
    """One thing to look at.

    Attributes:
        kind: what it is.
        message: one sentence.
        hint: what to do.
        about: names of what it is about; empty where it is about the run.
    """

    kind: AlertKind
    message: str
    hint: str
    about: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What is worth an alert.

    Attributes:
        expected_s: seconds between saves; None for what is measured.
        late: how many intervals the newest save may be old.
        slower: how many times as long as usual a save may take.
        unread_s: seconds in which a scrub should have read every save; None for any number.
    """

    expected_s: float | None = None
    late: float = 2.0
    slower: float = 1.5
    unread_s: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What alerts are made of (see `ftckpt.health.Health`).

    Attributes:
        last: the save that was finished last.
        age_s: seconds since; None where nobody knows.
        ahead_s: seconds until, where its time lies in the future.
        interval_s: seconds between saves, as expected or measured.
        writing_now_s: how long the newest saves took.
        writing_before_s: how long those before took; None where there are too few.
        unfinished: saves that were begun after `last` and not finished.
        abandoned: saves that nobody will finish.
        corrupt: damaged entries.
        unsafe: entries that are hostile or ambiguous.
        torn: a save that lacks something, and that nobody goes on with; None without one.
        dangling: pointers to nothing.
        durable: what the second tier holds.
        durable_age_s: age of the newest save that both tiers hold.
        free: bytes that the filesystem has left.
        next_bytes: what the next save will take, by the newest.
        scrubbed: what is remembered of the content; None for nothing.
    """

    last: SurveyedEntry | None
    age_s: float | None
    ahead_s: float | None
    interval_s: float | None
    writing_now_s: float | None
    writing_before_s: float | None
    unfinished: Sequence[SurveyedEntry]
    abandoned: Sequence[SurveyedEntry]
    corrupt: Sequence[SurveyedEntry]
    unsafe: Sequence[SurveyedEntry]
    torn: SurveyedEntry | None
    dangling: Sequence[tuple[str, str]]
    durable: Durable | None
    durable_age_s: float | None
    free: int | None
    next_bytes: int | None
    scrubbed: Scrubbed | None


def alerts(facts: Facts, wanted: Thresholds) -> tuple[Alert, ...]:
    """Return what somebody should look at, in the order of `AlertKind`."""
    found = list(_alerts(facts, wanted))
    order = list(AlertKind)
    return tuple(sorted(found, key=lambda alert: order.index(alert.kind)))


def _alerts(facts: Facts, wanted: Thresholds) -> Iterator[Alert]:
    yield from _scrubbed(facts, wanted)
    if facts.last is None:
        yield Alert(
            AlertKind.EMPTY, "no save is finished", "ftckpt inspect ROOT says what lies there"
        )
    yield from _late(facts, wanted)
    if facts.ahead_s is not None:
        yield Alert(
            AlertKind.CLOCK,
            f"the last save lies {shown_duration(facts.ahead_s)} in the future, so that its age is "
            "not known",
            "compare this clock with that of the machine that saves: date -u",
        )
    for what, bad in (("damaged", facts.corrupt), ("unsafe or ambiguous", facts.unsafe)):
        if bad:
            names, about = _names(bad), tuple(h.entry.name for h in bad)
            said = f"{what}: {names}: {bad[-1].entry.why}"
            yield Alert(AlertKind.CORRUPT, said, "ftckpt verify says where", about)
    if facts.torn is not None:
        name, foreign = facts.torn.entry.name, facts.torn.entry.entry_class is EntryClass.FOREIGN
        what = "is above the newest save, and is not understood" if foreign else "is not whole"
        yield Alert(
            AlertKind.UNFINISHED,
            f"{name} {what}: {facts.torn.entry.why}",
            "ftckpt verify says what it lacks",
            (name,),
        )
    unfinished, _ = _apart(facts.unfinished)
    abandoned, copies = _apart(facts.abandoned)
    if len(unfinished) >= _PILE:
        yield Alert(
            AlertKind.UNFINISHED,
            f"{len(unfinished)} saves were begun since the last one was finished: "
            f"{_names(unfinished)}",
            "the trainer fails while it saves: its log says why",
            ("saves",),
        )
    elif len(abandoned) >= _ABANDONED:
        yield Alert(
            AlertKind.UNFINISHED,
            f"{len(abandoned)} abandoned saves pile up: {_names(abandoned)}",
            "ftckpt gc ROOT drops them",
            ("abandoned saves",),
        )
    if copies:
        yield Alert(
            AlertKind.UNFINISHED,
            f"{counted(len(copies), 'copy', 'copies')} to here stopped more than a day ago: "
            f"{_names(copies)}",
            f"{GO_ON}; ftckpt gc ROOT drops what it left",
            tuple(h.entry.name for h in copies),
        )
    yield from _not_durable(facts, wanted)
    yield from _slow(facts, wanted)
    for name, says in facts.dangling:
        yield Alert(
            AlertKind.POINTER,
            f"{name} says {says!r}, which is not there",
            "a trainer that follows it starts afresh or fails: ftckpt latest ROOT names the newest",
            (name,),
        )
    if facts.free is not None and facts.next_bytes and facts.free < 2 * facts.next_bytes:
        left = "the next save does not fit" if facts.free < facts.next_bytes else "one save fits"
        yield Alert(
            AlertKind.SPACE,
            f"{left}: {_gib(facts.free)} are free, and a save takes {_gib(facts.next_bytes)}",
            "ftckpt gc ROOT --free SIZE",
        )


def _scrubbed(facts: Facts, wanted: Thresholds) -> Iterator[Alert]:
    held = facts.scrubbed
    if held is None:
        if wanted.unread_s is not None and facts.last is not None:
            yield Alert(AlertKind.UNREAD, "no scrub has read any of the saves", _SCRUB)
        return
    if held.bad:
        worst = held.bad[0]
        rest = len(held.bad) - 1
        more = f"; so {'is' if rest == 1 else 'are'} {rest} more" if rest else ""
        yield Alert(
            AlertKind.CORRUPT,
            f"{worst.path} is known to be bad: {worst.message}{more}",
            f"ftckpt verify {shlex.quote(worst.path)} says where",
            tuple(one.path.rstrip("/").rpartition("/")[2] for one in held.bad),
        )
    waits = held.unread_s
    if wanted.unread_s is not None and waits is not None and waits > wanted.unread_s:
        said = f"{held.longest} was not read for {shown_duration(waits)}"
        blind = held.longest in held.unproven
        yield Alert(
            AlertKind.UNREAD, f"{said}{_BLIND if blind else ''}", _SEAL if blind else _SCRUB
        )


def _apart(
    entries: Sequence[SurveyedEntry],
) -> tuple[list[SurveyedEntry], list[SurveyedEntry]]:
    """Return a trainer's saves, and copies by ftckpt, which say nothing about the trainer."""
    copies = [one for one in entries if is_under_way(one.entry.why)]
    return [one for one in entries if one not in copies], copies


def _late(facts: Facts, wanted: Thresholds) -> Iterator[Alert]:
    if facts.age_s is None or facts.interval_s is None:
        return
    if facts.age_s > wanted.late * facts.interval_s:
        yield Alert(
            AlertKind.STALE,
            f"the last save is {shown_duration(facts.age_s)} old, and one is made every "
            f"{shown_duration(facts.interval_s)}",
            "is the job running? its log, and squeue or kubectl, say so",
        )


def _not_durable(facts: Facts, wanted: Thresholds) -> Iterator[Alert]:
    """A fresh save may still be on its way; what is late is late by the same measure as saves."""
    held = facts.durable
    if held is None or not held.missing or facts.last is None:
        return
    hint = f"ftckpt copy ROOT@latest {shlex.quote(held.url)}/"
    if held.newest is None:
        yield Alert(AlertKind.NOT_DURABLE, f"{held.url} holds none of the saves", hint)
        return
    if facts.durable_age_s is None or facts.interval_s is None:
        return
    newer = [h for h in held.missing if (h.entry.step or 0) > (held.newest.entry.step or 0)]
    if newer and facts.durable_age_s > (wanted.late + 1) * facts.interval_s:
        yield Alert(
            AlertKind.NOT_DURABLE,
            f"the newest save on {held.url} is {shown_duration(facts.durable_age_s)} old: "
            f"{len(newer)} newer are not there",
            hint,
        )


def _slow(facts: Facts, wanted: Thresholds) -> Iterator[Alert]:
    now, before = facts.writing_now_s, facts.writing_before_s
    if now is None or before is None:
        return
    if now > wanted.slower * before and now - before > _SLOWER_S:
        yield Alert(
            AlertKind.SLOW,
            f"writing a save takes {shown_duration(now)}, and took {shown_duration(before)} before",
            "storage is slower or shared with more: ftckpt plan says what it costs",
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.3g} GiB"


def _names(held: Sequence[SurveyedEntry]) -> str:
    return listed([h.entry.name for h in held], 3)
