"""Keep of a log's entries what an analysis needs: little, however long the log is.

Steps become stretches of progress, saves points in time, repeated lines one sighting with a count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ftckpt.errors import NoResourceError

from .durations import Durations, Mean
from .entries import LogEntry, LogEntryKind, Weight

# A silence of this long, or of ten times the usual distance of two lines, ends a stretch; an hour
# where that is not known yet.
_SILENCE, _SILENCES, _FIRST = 300.0, 10.0, 3600.0
# After a failure's line, training that goes on within this has not stopped.
_GOES_ON = 60.0
_MOST = 500_000  # sightings, stretches, saves and starts together
_MOST_RANKS = 65_536
_MOST_HELD = 4_000_000  # numbers in the durations of all ranks together
_LONGEST_AVERAGE = 10_000  # steps that one line may speak of
_NAMES = 256


@dataclass(slots=True)
class Stretch:
    """Steps one after the other.

    Attributes:
        began: time of its first step's line.
        ended: of its last.
        first: number of the first step.
        last: of the last.
        stride: steps from line to line.
        source: number of the file.
        rank: that says so; None where the lines name none.
        bar: whether its count begins anew with each epoch or evaluation.
    """

    began: float
    ended: float
    first: int
    last: int
    stride: int
    source: int
    rank: int | None = None
    bar: bool = False
    doubted: bool = False  # a failure's line came after its last step


@dataclass(slots=True)
class Sighting:
    """A failure's line, with those that repeat it.

    Attributes:
        entry: the first of them.
        last: time of the last.
        count: of the lines.
        nodes: that said so.
        ranks: that said so.
    """

    entry: LogEntry
    last: float | None
    count: int = 1
    nodes: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)


class SeenSave(NamedTuple):
    """A save; `noticed` as in `LogEntry`."""

    time: float | None
    step: int | None
    noticed: bool


class Collection:
    """What all logs of one run say.

    Args:
        together: seconds within which two lines may be of one failure.

    Attributes:
        sightings: of failures, in the order of reading.
        stretches: of steps.
        saves: of each its time and step, either None where the log does not say it.
        starts: entries of starts.
        ends: entries of ends.
        steps: durations of steps, of all ranks.
        by_rank: the same for each rank that a log names.
        ranks_dropped: whether there were more ranks than are told apart.
        times: the first and the last.
        events: number of entries by kind.
        waited, snapshots, flushes: mean seconds of saves.
        nbytes: of the last save that says it.
        detects, restarts: mean seconds of failures that record them.
        nodes: names of nodes that any entry has.
    """

    def __init__(self, together: float) -> None:
        self._together = together
        self.sightings: list[Sighting] = []
        self.stretches: list[Stretch] = []
        self.saves: list[SeenSave] = []
        self.starts: list[LogEntry] = []
        self.ends: list[LogEntry] = []
        self.steps = Durations()
        self.by_rank: dict[int, Durations] = {}
        self.ranks_dropped = False
        self.times: tuple[float, float] | None = None
        self.events: Counter[LogEntryKind] = Counter()
        self.waited, self.snapshots, self.flushes = Mean(), Mean(), Mean()
        self.nbytes: float | None = None
        self.detects, self.restarts = Mean(), Mean()
        self.nodes: set[str] = set()
        self._open: dict[tuple[str, str, str], Sighting] = {}
        self._running: dict[tuple[int, int | None], Stretch] = {}
        self._usual: dict[tuple[int, int | None], float] = {}  # seconds from line to line
        self._held = 0

    def take(self, entries: Iterable[LogEntry]) -> None:
        """Take the entries of one file, in their order.

        Raises:
            NoResourceError: the log says more than is kept.
        """
        self._open.clear()
        self._running.clear()
        for entry in entries:
            self.events[entry.kind] += 1
            if entry.time is not None:
                first, last = self.times or (entry.time, entry.time)
                self.times = min(first, entry.time), max(last, entry.time)
            if entry.node and len(self.nodes) < _MOST_RANKS:
                self.nodes.add(entry.node)
            match entry.kind:
                case LogEntryKind.FAILURE:
                    self._failure(entry)
                case LogEntryKind.STEP:
                    self._step(entry)
                case LogEntryKind.SAVE:
                    self._save(entry)
                case LogEntryKind.START:
                    self._break()
                    self.starts.append(entry)
                case LogEntryKind.END:
                    self._break()
                    self.ends.append(entry)
            if self._kept > _MOST:
                raise NoResourceError(
                    f"the logs hold more than {_MOST:,} failures, starts, saves and breaks of "
                    "training",
                    hint="name the logs of one run, or fewer of them",
                )

    @property
    def _kept(self) -> int:
        return (
            len(self.sightings) + len(self.stretches) + len(self.saves) + len(self.starts)
            + len(self.ends)
        )  # fmt: skip

    def _break(self) -> None:
        """Note that training stopped here, and that what comes is something else."""
        self._open.clear()
        self._running.clear()

    def _failure(self, entry: LogEntry) -> None:
        if entry.weight >= Weight.STOP:
            self._running.clear()
        elif entry.weight is Weight.FATAL:
            for stretch in self._running.values():
                stretch.doubted = True
        assert entry.fault is not None
        key = (entry.fault.name, entry.node, entry.sign)
        seen = self._open.get(key)
        if seen is None or not (
            seen.entry.told_by_another_rank(entry) and self._repeats(seen, entry)
        ):  # what each rank says of one failure counts once
            self.detects.add(entry.detect)
            self.restarts.add(entry.restart)
        if seen is None or entry.weight is Weight.RECORD or not self._repeats(seen, entry):
            seen = Sighting(entry, entry.time, 0)
            self.sightings.append(seen)
            self._open[key] = seen
        seen.count += 1
        seen.last = seen.last if entry.time is None else max(entry.time, seen.last or entry.time)
        if entry.node and len(seen.nodes) < _NAMES:
            seen.nodes.add(entry.node)
        if entry.rank is not None and len(seen.ranks) < _MOST_RANKS:
            seen.ranks.add(entry.rank)

    def _repeats(self, seen: Sighting, entry: LogEntry) -> bool:
        if seen.last is None or entry.time is None:
            return seen.last is entry.time
        return abs(entry.time - seen.last) <= self._together

    def _save(self, entry: LogEntry) -> None:
        self._open.clear()
        self.waited.add(entry.seconds)
        self.snapshots.add(entry.snapshot)
        self.flushes.add(entry.flush)
        self.nbytes = self.nbytes if entry.nbytes is None else entry.nbytes
        self.saves.append(SeenSave(entry.time, entry.step, entry.noticed))

    def _step(self, entry: LogEntry) -> None:
        self._open.clear()
        key = (entry.source, entry.rank if len(self._running) < _MOST_RANKS else None)
        before = self._running.get(key)
        stretch = None
        took, weight = entry.seconds, 1.0
        if entry.time is not None and entry.step is not None:
            goes_on = before is not None and self._continues(
                before, self._usual.get(key, 0.0), entry.time, entry.step
            )
            if before is None or not goes_on:
                stretch = Stretch(
                    entry.time, entry.time, entry.step, entry.step, 1, *key, bar=entry.bar
                )
                self._running[key] = stretch
                self.stretches.append(stretch)
            else:
                gap, done = entry.time - before.ended, entry.step - before.last
                if done > 0:
                    if took is None:
                        took = gap / done
                    weight = float(min(done, _LONGEST_AVERAGE))
                    before.stride = done
                    usual = self._usual.get(key, gap)
                    self._usual[key] = 0.9 * usual + 0.1 * gap
                before.ended, before.last, before.doubted = entry.time, entry.step, False
        if took is not None:
            self._took(entry.rank, took, weight)

    @staticmethod
    def _continues(before: Stretch, usual: float, time: float, step: int) -> bool:
        gap, done = time - before.ended, step - before.last
        if gap < 0 or done < 0:
            return False
        if before.doubted:
            return gap <= max(_GOES_ON, 5 * usual) and done <= max(1, before.stride)
        return gap <= (max(_SILENCE, _SILENCES * usual) if usual else _FIRST)

    def _took(self, rank: int | None, seconds: float, weight: float) -> None:
        self.steps.add(seconds, weight)
        if rank is None:
            return
        own = self.by_rank.get(rank)
        if own is None:
            if len(self.by_rank) >= _MOST_RANKS or self._held >= _MOST_HELD:
                self.ranks_dropped = True
                return
            own = self.by_rank[rank] = Durations()
        held = own.size
        own.add(seconds, weight)
        self._held += own.size - held
