"""Put together the lines that tell of one failure, and find out what each cost.

A lost GPU lets hundreds of ranks time out ten minutes later, torchrun give up on each node, and
Slurm cancel the job. Lines are of one incident where they are no further apart than `together` and
nothing between them shows that training went on: no step, no save, no start. Its class is that of
the line nearest to the cause (`Fault.order`). A record of a whole failure (JSONL, sacct, a guard)
joins such lines, and another record of its own file only where that differs in the rank alone.

Lines that training survives are no incident: every later step within `together` says so. Where
steps are done again and neither a failure nor an end lies between, that is an incident of its own.

Find where training went back to an earlier step: it stopped there, whatever the logs say of it.

A node that loses its power, or a process that is killed, writes no line. The numbers of the steps
show it: 99 is followed by 50.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import ClassVar, NamedTuple, TypeVar

from ftckpt import reports

from .collect import (
    ABORTED,
    COLLECTIVE_TIMEOUT,
    KILLED,
    NETWORK,
    TOLD_BY_OTHERS,
    UNSAID,
    Collection,
    Fault,
    LogEntry,
    Sighting,
    Stretch,
    Weight,
)

# Lines of ranks that are not told apart come in any order within this.
_ORDER = 60.0


class Rewind(NamedTuple):
    """One such place.

    Attributes:
        since: time at which the stretch of steps began that ended here.
        after: of its last line.
        before: of the first line of the next, with an earlier step or the same.
    """

    since: float
    after: float
    before: float


def rewinds_of(stretches: Iterable[Stretch]) -> list[Rewind]:
    """Return where steps went back, in the order of their times.

    Only lines of one file and rank are compared, and no progress bars. What several ranks or files
    say of one restart is one.
    """
    by: dict[tuple[int, int | None], list[Stretch]] = {}
    for stretch in stretches:
        if not stretch.bar:
            by.setdefault((stretch.source, stretch.rank), []).append(stretch)
    each = sorted(
        (found for row in by.values() for found in _of_one(row)), key=lambda one: one.after
    )
    merged: list[Rewind] = []
    for one in each:
        if merged and one.after < merged[-1].before:
            last = merged[-1]
            # The last line of any rank is the last sign of life.
            merged[-1] = Rewind(max(last.since, one.since), one.after, min(last.before, one.before))
        else:
            merged.append(one)
    return merged


def _of_one(stretches: Sequence[Stretch]) -> Iterator[Rewind]:
    row = sorted(stretches, key=lambda one: one.began)
    for place in range(1, len(row)):
        last, one = row[place - 1], row[place]
        if one.first > last.last or one.began <= last.ended:
            continue
        following = row[place + 1] if place + 1 < len(row) else None
        if not _disordered(last, one, following):
            yield Rewind(last.began, last.ended, one.began)


def _disordered(last: Stretch, one: Stretch, following: Stretch | None) -> bool:
    """Return whether ranks that are not told apart explain a step back: one is behind the other."""
    gap = one.began - last.ended
    if gap > _ORDER:
        return False
    if (
        following is not None
        and following.first > last.last
        and following.began - one.ended <= _ORDER
    ):  # what was behind does not catch up: the other goes on from where it was
        return True
    lines = (last.last - last.first) / last.stride
    usual = (last.ended - last.began) / lines if lines else _ORDER
    return gap < usual and last.last - one.first <= 2 * max(last.stride, one.stride)


_T = TypeVar("_T")
# Stretches that begin this soon after the first one after a failure belong to the same restart.
_SAME_RESTART = 60.0
_SIGNS = 6


def iso_time(time: float) -> str:
    """Return a time in UTC, to the second."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Until(StrEnum):
    """What a recovery was measured to."""

    RECORDED = "recorded"
    STEP = "step"
    START = "start"


@dataclass(slots=True)
class Incident:
    """One failure of the job.

    Attributes:
        time: of its first line, in seconds since the epoch; None where no line near it has a time.
        fault: of the line nearest to the cause.
        node: of that line, or the only node that any line names; "" where nothing says it.
        rank: likewise.
        signs: what the lines say, in fixed words, the cause first.
        lines: their number.
        ranks: number of ranks that said so.
        detect_s: as recorded.
        restart_s: as recorded.
        recovery_s: from its time until training continued; None where nothing says it.
        until: what that was measured to.
        rewound: steps that had to be done again; None where nothing says it.
        away_s: until the next incident, where nothing shows that training had continued before it.
        exposed: whether it struck a job that could fail (not one that was down already).
    """

    SAID: ClassVar = {
        "utc": "utc", "class": "kind", "component": "component", "node": "known_node"
    }  # fmt: skip

    time: float | None
    fault: Fault = field(metadata=reports.UNSAID)
    node: str = field(default="", metadata=reports.UNSAID)
    rank: int | None = None
    signs: tuple[str, ...] = ()
    lines: int = 0
    ranks: int = 0
    detect_s: float | None = field(default=None, metadata=reports.UNSAID)
    restart_s: float | None = field(default=None, metadata=reports.UNSAID)
    recovery_s: float | None = None
    until: Until | None = None
    rewound: int | None = field(default=None, metadata=reports.said_as("rewound_steps"))
    away_s: float | None = field(default=None, metadata=reports.UNSAID)
    exposed: bool = True
    last: float | None = field(default=None, repr=False, metadata=reports.UNSAID)

    @property
    def utc(self) -> str | None:
        """Its time in words; None where it is not known."""
        return None if self.time is None else iso_time(self.time)

    @property
    def kind(self) -> str:
        """The name of its class."""
        return self.fault.name

    @property
    def component(self) -> str:
        """What failed."""
        return self.fault.component

    @property
    def known_node(self) -> str | None:
        """Its node; None where nothing says it."""
        return self.node or None


class Progress:
    """When a run made progress, by its stretches, saves and starts."""

    def __init__(self, collection: Collection) -> None:
        self._stretches = sorted(collection.stretches, key=lambda one: one.began)
        self._began = [one.began for one in self._stretches]
        self._saves = sorted(
            one.time for one in collection.saves if one.time is not None and not one.noticed
        )
        self._saved = sorted({one.step for one in collection.saves if one.step is not None})
        self.step_s = collection.steps.quantile(0.5) or 0.0
        self._starts = sorted(
            (one for one in collection.starts if one.time is not None), key=_time_of
        )
        self._started = [_time_of(one) for one in self._starts]
        # The furthest end and step of all stretches up to each.
        self._ended: list[float] = []
        furthest = float("-inf")
        for one in self._stretches:
            furthest = max(furthest, one.ended)
            self._ended.append(furthest)

    @property
    def has_steps(self) -> bool:
        """Whether the logs show steps with their times."""
        return bool(self._stretches)

    def between(self, after: float, before: float) -> bool:
        """Return whether training began again, or saved, in an open interval of time."""
        return any(
            bisect_right(times, after) < bisect_left(times, before)
            for times in (self._began, self._saves, self._started)
        )

    def went_on(self, time: float, until: float) -> bool:
        """Return whether a stretch that began before `time` goes on beyond `until`."""
        place = bisect_right(self._began, time)
        return place > 0 and self._ended[place - 1] >= until

    def resumed(self, after: float, before: float) -> list[Stretch]:
        """Return the stretches of the restart that follows `after`; [] without one by `before`."""
        place = bisect_right(self._began, after)
        found: list[Stretch] = []
        for one in self._stretches[place:]:
            if one.began >= before or (found and one.began > found[0].began + _SAME_RESTART):
                break
            found.append(one)
        return found

    def started(self, after: float, before: float) -> LogEntry | None:
        """Return the first start after one time and not after another."""
        place = bisect_right(self._started, after)
        if place < len(self._starts) and self._started[place] <= before:
            return self._starts[place]
        return None

    def resumed_at(self, stretch: Stretch, stride: int) -> int:
        """Return the step from which a restart went on, whose first line is that of `stretch`.

        A saved step between that line and the one before it; else, in a log of every tenth step,
        step 1000 for a first line of 1010, and for one of 1001.
        """
        place = bisect_left(self._saved, stretch.first)
        if place and self._saved[place - 1] >= stretch.first - stride:
            return self._saved[place - 1]
        return stretch.first - (stride if stretch.first % stride == 0 else 1)

    def highest(self, time: float) -> Stretch | None:
        """Return the stretch that had come furthest in the attempt that ran until `time`."""
        place = bisect_right(self._began, time)
        if not place:
            return None
        newest = self._stretches[place - 1]
        attempt = self._stretches[max(0, place - 4096) : place]
        return max(
            (one for one in attempt if one.began >= newest.began - _SAME_RESTART),
            key=lambda one: one.last,
        )


def _time_of(entry: LogEntry) -> float:
    assert entry.time is not None
    return entry.time


def incidents_of(collection: Collection, together: float) -> tuple[list[Incident], list[Incident]]:
    """Return the incidents of a run in the order of their times, and what was none.

    Incidents without a time come last. The second list holds signs that training survived, and
    hints at a failure that no other line confirms.
    """
    progress = Progress(collection)
    timed = [one for one in collection.sightings if one.entry.time is not None]
    timed.sort(key=lambda one: (one.entry.time, one.entry.source, one.entry.line))
    timed = _without_farewells(timed, collection, progress, together)
    found: list[Incident] = []
    survived: list[Incident] = []
    for group in _groups(timed, progress, together):
        incident = _incident(group)
        (found if _stopped(group, incident, progress, together) else survived).append(incident)
    untimed = [*_untimed(one for one in collection.sightings if one.entry.time is None)]
    # A record without a time may tell of any of them.
    told = sum(max(one.entry.weight for one in group) > Weight.HINT for group in untimed)
    found += _unsaid(collection, found)[told:]
    found.sort(key=lambda one: one.time or 0.0)
    for place, incident in enumerate(found):
        following = found[place + 1].time if place + 1 < len(found) else None
        _measure(incident, progress, float("inf") if following is None else following)
    for group in untimed:
        incident = _incident(group)
        strongest = max(one.entry.weight for one in group)
        (found if strongest > Weight.HINT else survived).append(incident)
    return found, survived


def _unsaid(collection: Collection, found: Sequence[Incident]) -> list[Incident]:
    """Return an incident for each time that steps went back and nothing in the logs says why."""
    told = sorted((one.time, one.last or one.time) for one in found if one.time is not None)
    told += [(one.time, one.time) for one in collection.ends if one.time is not None]
    told.sort()
    begins = [begin for begin, _ in told]
    latest: list[float] = []  # the furthest end of all up to each
    for _, end in told:
        latest.append(max(end, latest[-1]) if latest else end)

    def explained(one: Rewind) -> bool:
        # Whole seconds and the clocks of two machines differ.
        place = bisect_right(begins, one.before + 1.0)
        return place > 0 and latest[place - 1] >= max(one.since, one.after - _SAME_RESTART)

    return [
        Incident(one.after, UNSAID, signs=("steps done again",), last=one.after)
        for one in rewinds_of(collection.stretches)
        if not explained(one)
    ]


def _without_farewells(
    timed: Sequence[Sighting], collection: Collection, progress: Progress, together: float
) -> list[Sighting]:
    """Leave out what processes say as they are ended after a person or a time limit ended the job.

    A lost GPU, a full disk and a record of a whole failure stay.
    """
    planned = [(_time_of(one), one) for one in collection.ends if one.planned and one.time]
    planned.sort(key=lambda pair: pair[0])
    times = [time for time, _ in planned]

    def is_farewell(one: Sighting) -> bool:
        assert one.entry.fault is not None
        if one.entry.weight is Weight.RECORD or one.entry.fault.order < NETWORK.order:
            return False
        time = _time_of(one.entry)
        place = bisect_right(times, time) - 1
        if place < 0 or time - times[place] > together or progress.between(times[place], time):
            return False
        end = planned[place][1]
        return time > times[place] or end.source != one.entry.source or end.line < one.entry.line

    return [one for one in timed if not is_farewell(one)]


def _groups(
    sightings: Sequence[Sighting], progress: Progress, together: float
) -> Iterable[list[Sighting]]:
    group: list[Sighting] = []
    last = 0.0
    recorded: dict[int, tuple[LogEntry, set[int | None]]] = {}  # by file: the first, all ranks
    for one in sightings:
        time = _time_of(one.entry)
        record = one.entry.weight is Weight.RECORD
        apart = (
            not group
            or time - last > together
            or (record and not _same_record(recorded.get(one.entry.source), one.entry))
            or progress.between(last, time)
        )
        if apart:
            if group:
                yield group
            group, recorded, last = [], {}, time
        group.append(one)
        last = max(last, one.last or time)
        if record:
            recorded.setdefault(one.entry.source, (one.entry, set()))[1].add(one.entry.rank)
    if group:
        yield group


def _same_record(before: tuple[LogEntry, set[int | None]] | None, record: LogEntry) -> bool:
    """Return whether a record is of the failure that those of its file before it tell of."""
    if before is None:
        return True
    first, ranks = before
    return record.rank not in ranks and first.told_by_another_rank(record)


def _untimed(sightings: Iterable[Sighting]) -> Iterable[list[Sighting]]:
    """Group lines without any time: neighbours of one file, until a record or a stop ends them."""
    group: list[Sighting] = []
    for one in sightings:
        if group and (
            one.entry.source != group[-1].entry.source or group[-1].entry.weight is Weight.RECORD
        ):
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _incident(group: Sequence[Sighting]) -> Incident:
    waited = min(
        (one.entry.time or 0.0 for one in group if one.entry.fault == COLLECTIVE_TIMEOUT),
        default=float("inf"),
    )

    def cause(one: Sighting) -> tuple[int, bool, float]:
        assert one.entry.fault is not None
        time = one.entry.time or 0.0
        # A watchdog aborts its process, and the launcher kills the others.
        ended = one.entry.fault in (ABORTED, KILLED) and time >= waited
        return COLLECTIVE_TIMEOUT.order if ended else one.entry.fault.order, ended, time

    # A hint does not name the cause where something surer does.
    sure = [one for one in group if one.entry.weight > Weight.HINT] or list(group)
    ordered = sorted(sure, key=cause)
    best = ordered[0].entry
    assert best.fault is not None
    ranks = {rank for one in group for rank in one.ranks}
    # Of a failure that only others can tell of, no other line names the node.
    alike = [one for one in ordered if one.entry.fault == best.fault]
    telling = alike if best.fault.name in TOLD_BY_OTHERS else group
    node = (
        best.node
        or _only(ordered[0].nodes)
        or _only(n for one in alike for n in one.nodes)
        or _only(n for one in telling for n in one.nodes)
    )
    rank = _only(ordered[0].ranks) if best.rank is None else best.rank
    records = [one.entry for one in group if one.entry.weight is Weight.RECORD]
    recorded = records[0] if records else None
    signs = [one.entry.sign for one in ordered if one.entry.sign]
    times = [one.entry.time for one in group if one.entry.time is not None]
    ends = [one.last for one in group if one.last is not None]
    return Incident(
        # A record says when it struck; lines say when something was noticed.
        time=recorded.time
        if recorded and recorded.detect is not None
        else min(times, default=None),
        fault=best.fault,
        node=node or "",
        rank=_only(ranks) if rank is None else rank,
        signs=tuple(dict.fromkeys(signs))[:_SIGNS],
        lines=sum(one.count for one in group),
        ranks=len(ranks),
        detect_s=recorded.detect if recorded else None,
        restart_s=recorded.restart if recorded else None,
        last=max(ends, default=None),
    )


def _only(names: Iterable[_T]) -> _T | None:
    """Return the one name among all; None where there are several, or none."""
    different = set(names)
    return next(iter(different)) if len(different) == 1 else None


def _stopped(
    group: Sequence[Sighting], incident: Incident, progress: Progress, together: float
) -> bool:
    """Return whether lines tell of a failure that stopped the job."""
    strongest = max(one.entry.weight for one in group)
    if strongest >= Weight.STOP:
        return True
    if strongest is Weight.HINT or incident.time is None:
        return False
    return not progress.went_on(incident.time, (incident.last or incident.time) + together)


def _measure(incident: Incident, progress: Progress, following: float) -> None:
    """Find out when training continued, and from which step."""
    if incident.time is None:
        return
    resumed = progress.resumed(incident.time, following)
    start = progress.started(incident.time, following)
    before = progress.highest(incident.time)
    first = min(resumed, key=lambda one: one.first, default=None)
    resumed_at = None
    if first is not None:
        stride = max(one.stride for one in resumed if one.first == first.first)
        if before is not None:
            stride = max(stride, before.stride)
        resumed_at = progress.resumed_at(first, stride)
    if start is not None and start.step is not None:
        resumed_at = start.step
    if incident.detect_s is not None or incident.restart_s is not None:
        incident.recovery_s = (incident.detect_s or 0.0) + (incident.restart_s or 0.0)
        incident.until = Until.RECORDED
    elif first is not None and resumed_at is not None:
        # A line comes when its steps are done.
        done = max(0, first.first - resumed_at) * progress.step_s
        incident.recovery_s = max(0.0, first.began - done - incident.time)
        incident.until = Until.STEP
    elif start is not None:
        incident.recovery_s, incident.until = _time_of(start) - incident.time, Until.START
    if incident.until is not Until.RECORDED and progress.has_steps and not resumed:
        incident.away_s = following - incident.time if following < float("inf") else None
    if before is not None and resumed_at is not None:
        incident.rewound = max(0, before.last - resumed_at)
