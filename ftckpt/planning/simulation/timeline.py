"""Walk through a job without failures, event by event.

A timeline as tables: how far a job has come after a time, for many runs at once.

Account for every second of every simulated run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from ftckpt.errors import FtckptError
from ftckpt.planning.models.spot import Costs, Pattern

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float64]
    Places: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TimelinePhase:
    """A stretch of time in which one thing happens.

    Attributes:
        kind: `work`, `wait` for an earlier flush, or `save`.
        speed: of work, as a fraction of full speed.
    """

    kind: Literal["work", "wait", "save"]
    seconds: float
    speed: float = 0.0


@dataclass(frozen=True, slots=True)
class Bulk:
    """Work and its save.

    Attributes:
        phases: in order; the save is last.
        level: number of the highest tier that the save goes to, from 0.
    """

    phases: tuple[TimelinePhase, ...]
    level: int = 0

    @property
    def seconds(self) -> float:
        """Seconds from its beginning to the end of its save."""
        return math.fsum(phase.seconds for phase in self.phases)

    @property
    def waiting(self) -> float:
        """Seconds of waiting."""
        return math.fsum(p.seconds for p in self.phases if p.kind == "wait")

    @property
    def stalled(self) -> float:
        """Seconds of the save, and of work lost to a flush."""
        return math.fsum(
            p.seconds * (1 - p.speed) if p.kind == "work" else p.seconds
            for p in self.phases
            if p.kind != "wait"
        )

    def time_of(self, work: float) -> float:
        """Return when this much work is done, in seconds from the beginning of the bulk."""
        passed = 0.0
        for phase in self.phases:
            done = phase.seconds * phase.speed
            if phase.kind == "work" and done >= work * (1 - 1e-12):
                return passed + work / phase.speed if work > 0 else passed
            work -= done
            passed += phase.seconds
        raise ValueError(f"a bulk ends {work} s of work before it")


@dataclass(frozen=True, slots=True)
class Timeline:
    """A job without failures: one first bulk, then an endless cycle of bulks.

    Attributes:
        work: useful seconds in each bulk.
        first: the bulk after a restart, with no flush behind it; for the first place of the cycle.
        cycle: the bulks of one round, with the previous flush still running.
        delay: seconds from the end of a save until its copy is durable.
    """

    work: float
    first: Bulk
    cycle: tuple[Bulk, ...]
    delay: float


def of_costs(interval: float, costs: Costs) -> Timeline:
    """Return the timeline of a job with one tier, with or without a background flush."""
    return Timeline(
        work=interval,
        first=_bulk(interval, costs.save, 0.0, costs.slowdown),
        cycle=(_bulk(interval, costs.save, costs.flush, costs.slowdown),),
        delay=costs.flush,
    )


def of_pattern(pattern: Pattern) -> Timeline:
    """Return the timeline of a job with several tiers and blocking saves."""
    work = float(pattern.interval)
    counts = [int(count) for count in pattern.counts]
    bulks = []
    for number in range(1, math.prod(counts) + 1):
        level = 0
        while level < len(counts) and number % math.prod(counts[: level + 1]) == 0:
            level += 1
        save = math.fsum(tier.cost for tier in pattern.tiers[: level + 1])
        bulks.append(Bulk((TimelinePhase("work", work, 1.0), TimelinePhase("save", save)), level))
    return Timeline(work=work, first=bulks[0], cycle=tuple(bulks), delay=0.0)


def _bulk(interval: float, save: float, flush: float, slowdown: float) -> Bulk:
    """Simulate one bulk; an earlier flush still takes `flush` seconds when it begins."""
    phases = []
    left = interval
    while left > 0:
        speed = 1 - slowdown if flush > 0 else 1.0
        until_done = left / speed if speed > 0 else math.inf
        if 0 < flush < until_done:
            phases.append(TimelinePhase("work", flush, speed))
            left -= flush * speed
            flush = 0.0
        else:
            phases.append(TimelinePhase("work", until_done, speed))
            left = 0.0
            flush = max(0.0, flush - until_done)
    if flush > 0:
        phases.append(TimelinePhase("wait", flush))
    phases.append(TimelinePhase("save", save))
    return Bulk(tuple(phases))


class Clock:
    """Sums over the bulks of a timeline.

    A place is a number of saves since the beginning of the run. After a restart at a place the job
    goes through the bulks behind it, the first of them without an earlier flush.
    """

    def __init__(self, timeline: Timeline) -> None:
        import numpy as np

        cycle = timeline.cycle
        self.work = timeline.work
        self.length = len(cycle)
        self.ends = np.concatenate(([0.0], np.cumsum([bulk.seconds for bulk in cycle])))
        self._stalls = np.concatenate(([0.0], np.cumsum([bulk.stalled for bulk in cycle])))
        self._waits = np.concatenate(([0.0], np.cumsum([bulk.waiting for bulk in cycle])))
        # The first bulk after a restart is shorter by this.
        self.head = cycle[0].seconds - timeline.first.seconds
        self._head_stall = cycle[0].stalled - timeline.first.stalled
        self._head_wait = cycle[0].waiting - timeline.first.waiting
        self.delay = timeline.delay
        self._first, self._behind = _Course(timeline.first), _Course(cycle[0])

    def durable(self, place: Places, seconds: Floats) -> Places:
        """Return the number of durable saves some seconds after a restart at a place."""
        import numpy as np

        total = self._sum(self.ends, place) + (seconds + (self.head - self.delay))
        rounds = np.floor(total / self.ends[-1])
        saves = rounds.astype(np.int64) * self.length - place
        if self.length > 1:
            saves += np.searchsorted(self.ends[1:], total - rounds * self.ends[-1], side="right")
        found: Places = np.maximum(saves, 0)
        return found

    def seconds(self, place: Places, saves: Places) -> Floats:
        """Return the time of a number of saves after a restart at a place."""
        return self._between(self.ends, place, saves) - self.head * (saves > 0)

    def stalled(self, place: Places, saves: Places) -> Floats:
        """Return the part of `seconds` spent on saving."""
        return self._between(self._stalls, place, saves) - self._head_stall * (saves > 0)

    def waited(self, place: Places, saves: Places) -> Floats:
        """Return the part of `seconds` spent waiting for a flush."""
        return self._between(self._waits, place, saves) - self._head_wait * (saves > 0)

    def progress(self, seconds: Floats) -> tuple[Floats, Floats]:
        """Return work done and time waited some seconds after a restart, durable or not.

        For a timeline of one bulk.
        """
        import numpy as np

        begun = np.maximum(np.floor((seconds + self.head) / self.ends[-1]), 0.0)
        since = seconds + self.head - begun * self.ends[-1]
        first = begun < 1
        done = np.where(
            first, self._first.work(seconds), begun * self.work + self._behind.work(since)
        )
        waits = begun * self._waits[-1] - self._head_wait + self._behind.wait(since)
        return done, np.where(first, 0.0, waits)

    def _between(self, table: Floats, place: Places, saves: Places) -> Floats:
        if self.length > 1:
            return self._sum(table, place + saves) - self._sum(table, place)
        total: Floats = table[-1] * saves
        return total

    def _sum(self, table: Floats, place: Places) -> Floats:
        total: Floats = table[-1] * (place // self.length)
        return total + table[place % self.length] if self.length > 1 else total


class _Course:
    """How work and waiting add up within one bulk."""

    def __init__(self, bulk: Bulk) -> None:
        import numpy as np

        seconds = [phase.seconds for phase in bulk.phases]
        work = [phase.seconds * phase.speed for phase in bulk.phases]
        wait = [phase.seconds * (phase.kind == "wait") for phase in bulk.phases]
        self._ends, self._work, self._wait = (
            np.concatenate(([0.0], np.cumsum(each))) for each in (seconds, work, wait)
        )

    def work(self, seconds: Floats) -> Floats:
        """Return the work done a number of seconds after the bulk begins."""
        import numpy as np

        return np.interp(seconds, self._ends, self._work)

    def wait(self, seconds: Floats) -> Floats:
        """Return the time waited a number of seconds after the bulk begins."""
        import numpy as np

        return np.interp(seconds, self._ends, self._wait)


ACCOUNTS = ("useful", "save", "lost", "detection", "restart", "waiting")


class TimeLedger:
    """Seconds by account, one number per run.

    `wall` follows the failure clock and the accounts follow the job, so `check` finds a second that
    was forgotten or counted twice.
    """

    def __init__(self, runs: int) -> None:
        import numpy as np

        self.wall = np.zeros(runs)
        self.useful = np.zeros(runs)
        self.save = np.zeros(runs)
        self.lost = np.zeros(runs)
        self.detection = np.zeros(runs)
        self.restart = np.zeros(runs)
        self.waiting = np.zeros(runs)
        self.segments = 0

    def clear(self) -> None:
        """Reset the counts. Work discarded later may make an account fall below 0."""
        for account in (*ACCOUNTS, "wall"):
            getattr(self, account)[:] = 0.0
        self.segments = 0

    def copy(self, other: TimeLedger, which: npt.NDArray[np.bool_]) -> None:
        """Copy the accounts and the wall time of some runs."""
        for account in (*ACCOUNTS, "wall"):
            getattr(self, account)[which] = getattr(other, account)[which]

    def check(self) -> None:
        """Compare the sum of all accounts with the wall time.

        Raises:
            FtckptError: they differ by more than 1e-9 of it: the simulation is wrong.
        """
        total = sum(getattr(self, account) for account in ACCOUNTS)
        gap = float(abs(total - self.wall).max())
        if not gap <= 1e-9 * float(self.wall.max()):
            raise FtckptError(f"the simulation cannot account for {gap:g} s of its time")
