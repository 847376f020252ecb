"""Protect entries that no rule may drop: evidence, what is in use or cannot be judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.step_names import is_put_aside
from ftckpt.retention.policy import Policy
from ftckpt.retention.scan.entries import EntryClass, RootEntry

from .plan import Reason

# Training cannot make such a leap between two saves. The leap from the save before training to the
# first one does not count, nor do those within the first few thousand steps.
LEAP, LEAP_FROM = 100, 1000


class EntryGroup(NamedTuple):
    """The entries of one group, classified.

    Attributes:
        entries: all.
        stretches: the committed ones that rules and floors count, the oldest first. A leap of the
            step begins a new stretch, which counts as a separate run.
        held: committed ones that are kept whatever their order, and why.
    """

    entries: Sequence[RootEntry]
    stretches: tuple[tuple[RootEntry, ...], ...]
    held: dict[str, Reason]


def group_entries(entries: Sequence[RootEntry], now: float) -> EntryGroup:
    """Separate the committed checkpoints that count from those that are only kept.

    Entries of unknown order do not count: those without a step or dated in the future; nor does
    what somebody has put aside, because no run goes on from it. After a leap
    of the step, by accident or by an attempt to make the good ones expire, entries above it must
    not displace those below: the rules apply to both sides, and the first step above the leap
    stays.
    """
    held: dict[str, Reason] = {}
    counted: list[RootEntry] = []
    for entry in entries:
        if entry.entry_class is not EntryClass.COMMITTED:
            continue
        if entry.step is None:
            held[entry.name] = Reason("no-step", "neither its name nor its content says a step")
        elif is_put_aside(entry.name.rpartition("/")[2]):
            held[entry.name] = Reason("put-aside", "its name says that no trainer is to take it")
        elif entry.time is not None and entry.time > now:
            held[entry.name] = Reason("future", "its time lies in the future")
        else:
            counted.append(entry)
    stretches: list[list[RootEntry]] = []
    before: int | None = None
    for entry in sorted(counted, key=lambda e: e.age_order):
        assert entry.step is not None
        if before is None or _leaps(before, entry.step):
            stretches.append([])
        stretches[-1].append(entry)
        before = entry.step
    for below, above in pairwise(stretches):
        leap = Reason("step-jump", f"the step leaps from {below[-1].step} to {above[0].step}")
        held |= {entry.name: leap for entry in above if entry.step == above[0].step}
    return EntryGroup(entries, tuple(map(tuple, stretches)), held)


def _leaps(before: int, after: int) -> bool:
    return before > 1 and after > LEAP * max(before, LEAP_FROM)


def protect(run: EntryGroup, policy: Policy) -> Iterator[tuple[RootEntry, Reason]]:
    """Yield every entry of a run that stays whatever the rules say, with the protection."""
    for stretch in run.stretches:
        yield from _newest(stretch)
        whole = [entry for entry in stretch if not entry.thinned]
        if whole and len(whole) < len(stretch):
            yield from _newest(whole)
    timed = any(r in _BY_TIME for r in policy.rules)
    times = [e.time for stretch in run.stretches for e in stretch if e.time is not None]
    latest = max(times, default=None)
    for entry in run.entries:
        yield from _in_use(entry)
        if entry.contents is not None and entry.contents.run:
            yield entry, Reason("holds", f"{entry.contents.run} in it is of another run")
        match entry.entry_class:
            case EntryClass.COMMITTED:
                if entry.name in run.held:
                    yield entry, run.held[entry.name]
                if entry.named:
                    yield entry, Reason("named", "its name says what it is for")
                if timed and entry.time is None:
                    yield entry, Reason("no-time", "nothing says when it was saved")
            case EntryClass.ABANDONED:
                if entry.time is None or latest is None or latest <= entry.time:
                    yield entry, Reason("unfinished", "no save was finished after it")
                elif not _died(entry, run):
                    detail = f"no later save of {entry.format} shows what it lacks"
                    yield entry, Reason("unfinished", detail)
            case EntryClass.CORRUPT:
                if not policy.delete_corrupt:
                    yield entry, Reason("corrupt", entry.why)
            case EntryClass.UNSAFE | EntryClass.STAGING | EntryClass.FOREIGN | EntryClass.TRASH:
                yield entry, Reason(entry.entry_class.lower(), entry.why)


def _died(entry: RootEntry, run: EntryGroup) -> bool:
    """Whether there is a positive sign that the writer of an abandoned entry died.

    That is a mark of its writer: the name of an unfinished save, or a transfer of ftckpt's. That a
    commit marker is missing is one only if a later save of that format has it: else the format may
    be another's, who writes none.
    """
    return entry.commit is not CommitState.UNCOMMITTED or any(
        e.format == entry.format and e.commit is CommitState.COMMITTED
        for stretch in run.stretches
        for e in stretch
        if e.time is not None and entry.time is not None and e.time > entry.time
    )


_BY_TIME = frozenset(
    {"--keep-hourly", "--keep-daily", "--keep-weekly", "--keep-monthly", "--keep-within"}
)


def _newest(stretch: Sequence[RootEntry]) -> Iterator[tuple[RootEntry, Reason]]:
    """Yield the newest by step and by time (they differ after a restart); also of verified ones."""
    top, latest = _top(stretch).step, _latest(stretch)
    for entry in stretch:
        if entry.step == top:
            yield entry, Reason("newest", "the highest step")
        elif latest is not None and entry.step == latest.step:
            yield entry, Reason("newest", "the latest save, of a lower step")
    for verified in ([e for e in stretch if e.content_passed], [e for e in stretch if e.verified]):
        if not verified:
            continue
        best, last = _top(verified), _latest(verified)
        yield best, Reason("newest-verified", "the highest step whose content was checked")
        if last is not None and last.step != best.step:
            detail = "the latest save whose content was checked, of a lower step"
            yield last, Reason("newest-verified", detail)


def newest_first(stretch: Sequence[RootEntry]) -> tuple[list[RootEntry], list[RootEntry]]:
    """Return the entries of a stretch by step and by time, the newest first.

    The first verified one of each is kept as `newest-verified`.
    """
    timed = [e for e in stretch if e.time is not None]
    return sorted(stretch, key=_step_order)[::-1], sorted(timed, key=_time_order)[::-1]


def _top(entries: Sequence[RootEntry]) -> RootEntry:
    return max(entries, key=_step_order)


def _latest(entries: Sequence[RootEntry]) -> RootEntry | None:
    return max((e for e in entries if e.time is not None), key=_time_order, default=None)


def _step_order(entry: RootEntry) -> tuple[float, float, str]:
    return entry.age_order


def _time_order(entry: RootEntry) -> tuple[float, tuple[float, float, str]]:
    return -1.0 if entry.time is None else entry.time, entry.age_order


def _in_use(entry: RootEntry) -> Iterator[tuple[RootEntry, Reason]]:
    for pin in entry.pins:
        yield entry, Reason("pinned", f"by {pin.owner}: {pin.reason}")
    for pointer in entry.pointers:
        yield entry, Reason("pointer", f"{pointer} names it")
    for lease in entry.leases:
        yield entry, Reason("lease", f"{lease.holder} reads it")
