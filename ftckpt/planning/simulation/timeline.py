"""Walk through a job without failures, event by event."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ftckpt.planning.models.inputs import Costs, Pattern


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
