"""Protect entries that no rule may drop: evidence, what is in use or cannot be judged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ftckpt.checkpoint import CommitState
from ftckpt.discovery import series
from ftckpt.discovery.counts import averages_among
from ftckpt.discovery.step_names import is_put_aside
from ftckpt.retention.policy import Policy
from ftckpt.retention.scan.entries import EntryClass, RootEntry

from .plan import Reason

# Training cannot make such a leap between two saves. The leap from the save before training to the
# first one does not count, nor do those within the first few thousand steps.
LEAP, LEAP_FROM = 100, 1000

_NOT_SAVED = (EntryClass.FOREIGN, EntryClass.TRASH)
_MAY_GO = (EntryClass.COMMITTED, EntryClass.ABANDONED, EntryClass.CORRUPT)
_NO_STEP = "neither its name nor its content says a step"
_NOT_OF_A_SERIES = "it is not of the series: a person may have named it (--any-name lets it go)"


_USUAL = Policy()


class EntryGroup(NamedTuple):
    """The entries of one group, classified.

    Attributes:
        entries: all.
        stretches: the committed ones that rules and floors count, the oldest first. A leap of the
            step begins a new stretch, which counts as a separate run. A series whose content says
            no step is a stretch of its own; there `step` is the place in the order of its numbers.
        held: entries that are kept whatever their order, and why; committed ones do not count.
    """

    entries: Sequence[RootEntry]
    stretches: tuple[tuple[RootEntry, ...], ...]
    held: dict[str, Reason]


def group_entries(entries: Sequence[RootEntry], now: float, policy: Policy = _USUAL) -> EntryGroup:
    """Separate the committed checkpoints that count from those that are only kept.

    Entries of unknown order do not count: those without a step that are of no series or that a rule
    needs the step of, or dated in the future; nor does what somebody has put aside or named,
    because no run goes on from it; nor half of what is saved together; nor an average, which stays
    and goes with its weights (`averages_of`). After a leap
    of the step, by accident or by an attempt to make the good ones expire, entries above it must
    not displace those below: the rules apply to both sides, and the first step above the leap
    stays.
    """
    places = series.members({e.name: e.step for e in entries if e.entry_class not in _NOT_SAVED})
    averages = averages_of(entries)
    held: dict[str, Reason] = {}
    counted: list[RootEntry] = []
    for entry in entries:
        name = entry.name.rpartition("/")[2]
        committed = entry.entry_class is EntryClass.COMMITTED
        if entry.entry_class not in _MAY_GO or entry.name in averages:
            continue
        if is_put_aside(series.saved_name(name)):
            held[entry.name] = Reason("put-aside", "its name says that no trainer is to take it")
        elif committed and entry.step is None and not _is_ordered(entry, places, policy):
            said = ", ".join(f"{key} {value}" for key, value in entry.counts[:1])
            what = f"no step is known, {said} alone" if said else _NO_STEP
            held[entry.name] = Reason("no-step", what)
        elif not (policy.any_name or entry.name in places or _is_loaded_by_name(entry)):
            held[entry.name] = Reason("not-of-the-series", _NOT_OF_A_SERIES)
        elif not committed:
            continue
        elif entry.time is not None and entry.time > now:
            held[entry.name] = Reason("future", "its time lies in the future")
        else:
            counted.append(entry)
    whole, halves = _pairs(counted, places)
    held |= whole | halves
    counted = [entry for entry in counted if entry.name not in halves]
    stretches = _in_order(counted, places)
    before: int | None = None
    stepped = (entry for entry in counted if entry.step is not None)
    for entry in sorted(stepped, key=lambda e: e.age_order):
        assert entry.step is not None
        if before is None or _leaps(before, entry.step):
            stretches.append([])
            if before is not None:
                leap = Reason("step-jump", f"the step leaps from {before} to {entry.step}")
                held |= {e.name: leap for e in counted if e.step == entry.step}
        stretches[-1].append(entry)
        before = entry.step
    return EntryGroup(entries, tuple(map(tuple, stretches)), held)


def averages_of(entries: Iterable[RootEntry]) -> dict[str, str]:
    """Return each finished average with the finished checkpoint whose weights it was made of."""
    names = [e.name for e in entries if e.entry_class is EntryClass.COMMITTED]
    return averages_among(names)


def _is_loaded_by_name(entry: RootEntry) -> bool:
    """Whether it is a finished checkpoint with the name that a trainer loads it by."""
    own = entry.entry_class is EntryClass.COMMITTED and entry.named
    return own and series.is_trainers(entry.name)


def _is_ordered(entry: RootEntry, places: Mapping[str, series.SeriesPlace], policy: Policy) -> bool:
    """Whether the numbers of its series do for its step: only `--keep-every` counts in steps."""
    place = places.get(entry.name)
    return place is not None and place.counter and policy.keep_every is None


def _in_order(
    counted: Sequence[RootEntry], places: Mapping[str, series.SeriesPlace]
) -> list[list[RootEntry]]:
    """Return those without a step, by series and in the order of its counter, else its numbers."""
    by_series: dict[str, list[RootEntry]] = defaultdict(list)
    for entry in counted:
        if entry.step is None:
            by_series[places[entry.name].series].append(entry)
    found = []
    for _, siblings in sorted(by_series.items()):
        key = _counter_of(siblings)
        rank = {e.name: (dict(e.counts)[key],) if key else places[e.name].numbers for e in siblings}
        order = sorted(set(rank.values()))
        ranked = (replace(e, step=order.index(rank[e.name])) for e in siblings)
        found.append(sorted(ranked, key=lambda e: e.age_order))
    return found


def _counter_of(siblings: Sequence[RootEntry]) -> str:
    """Return the counter that all of a series record, each with a value of its own; "" for none."""
    for key in dict.fromkeys(key for e in siblings for key, _ in e.counts):
        values = [dict(e.counts).get(key) for e in siblings]
        if len(values) > 1 and None not in values and len(set(values)) == len(values):
            return key
    return ""


# The numbers of a name, and its step.
_Save = tuple[tuple[int, ...], int | None]


def _pairs(
    counted: Sequence[RootEntry], places: Mapping[str, series.SeriesPlace]
) -> tuple[dict[str, Reason], dict[str, Reason]]:
    """Return of series that are saved together the newest whole save, and what must not count.

    Two series are saved together if they have a number in common and nothing in the content tells
    the two apart (a GAN's `G_1600.pth` and `D_1600.pth`). A number that one of them lacks is half a
    save, and is kept. Number 0 is what both started from.
    """
    by_series: dict[str, dict[tuple[int, ...], RootEntry]] = defaultdict(dict)
    for entry in counted:
        place = places.get(entry.name)
        if place is not None and place.series != series.STEPS:
            by_series[place.series][place.numbers] = entry
    # Series with the same saves are alike to every other: thousands of names are a few kinds.
    kinds: dict[frozenset[_Save], list[str]] = defaultdict(list)
    sharing: dict[_Save, dict[frozenset[_Save], None]] = defaultdict(dict)
    for name, own in by_series.items():
        kind = frozenset((numbers, entry.step) for numbers, entry in own.items())
        kinds[kind].append(name)
        for save in kind:
            sharing[save][kind] = None
    whole: dict[str, Reason] = {}
    halves: dict[str, Reason] = {}
    for kind, names in kinds.items():
        for theirs in dict.fromkeys(other for save in kind for other in sharing[save]):
            common = max(numbers for numbers, _ in kind & theirs)
            there = {numbers for numbers, _ in theirs}
            for name in names:
                other = next((one for one in kinds[theirs] if one != name), "")
                if not other:
                    continue
                own = by_series[name]
                whole[own[common].name] = Reason("newest", f"the newest with one of {other}")
                for numbers, entry in own.items():
                    if not any(numbers):
                        halves[entry.name] = Reason("start", f"{name} and {other} start from it")
                    elif numbers not in there:
                        halves[entry.name] = Reason("half", f"{other} has no whole one beside it")
    return whole, halves


def _leaps(before: int, after: int) -> bool:
    return before > 1 and after > LEAP * max(before, LEAP_FROM)


def protect(run: EntryGroup, policy: Policy) -> Iterator[tuple[RootEntry, Reason]]:
    """Yield every entry of a run that stays whatever the rules say, with the protection."""
    steps = {entry.name: entry.step for entry in run.entries}
    for stretch in run.stretches:
        highest = "step" if steps[stretch[0].name] is not None else "number of its series"
        yield from _newest(stretch, highest)
        whole = [entry for entry in stretch if not entry.thinned]
        if whole and len(whole) < len(stretch):
            yield from _newest(whole, highest)
    timed = any(r in _BY_TIME for r in policy.rules)
    times = [e.time for stretch in run.stretches for e in stretch if e.time is not None]
    latest = max(times, default=None)
    for entry in run.entries:
        yield from _in_use(entry)
        if entry.contents is not None and entry.contents.run:
            yield entry, Reason("holds", f"{entry.contents.run} in it is of another run")
        if entry.name in run.held:
            yield entry, run.held[entry.name]
        match entry.entry_class:
            case EntryClass.COMMITTED:
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


def _newest(stretch: Sequence[RootEntry], highest: str) -> Iterator[tuple[RootEntry, Reason]]:
    """Yield the newest by step and by time (they differ after a restart); also of verified ones."""
    top, latest = _top(stretch).step, _latest(stretch)
    for entry in stretch:
        if entry.step == top:
            yield entry, Reason("newest", f"the highest {highest}")
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
    return sorted(stretch, key=lambda e: e.age_order)[::-1], sorted(timed, key=_time_order)[::-1]


def _top(entries: Sequence[RootEntry]) -> RootEntry:
    return max(entries, key=lambda e: e.age_order)


def _latest(entries: Sequence[RootEntry]) -> RootEntry | None:
    return max((e for e in entries if e.time is not None), key=_time_order, default=None)


def _time_order(entry: RootEntry) -> tuple[float, tuple[object, ...]]:
    return -1.0 if entry.time is None else entry.time, entry.age_order


def _in_use(entry: RootEntry) -> Iterator[tuple[RootEntry, Reason]]:
    for pin in entry.pins:
        yield entry, Reason("pinned", pin.who)
    for pointer in entry.pointers:
        yield entry, Reason("pointer", f"{pointer} names it")
    for lease in entry.leases:
        yield entry, Reason("lease", f"{lease.holder} reads it")
