"""What the logs of a run say about its failures: how often, what, where, and what they cost.

Rates have Garwood's exact Poisson limits over the time in which the job could fail
(`ftckpt.planning.exposure`). What no log says is None.

Whether a quantity rises or falls over time: Theil and Sen's slope, with Sen's limits.

The slope is the median of the slopes of all pairs of points: a quarter of the points may be wild
without changing it much. Its confidence limits come from the distribution of Kendall's rank
statistic (P. K. Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63,
1968): they hold for any distribution of the errors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, median
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.planning.exposure import LogEvent, at_least, exposure, mean_limits
from ftckpt.reports import UNSAID, said_as

from .collect import Collection
from .grouping import Incident, Until, incidents_of

if TYPE_CHECKING:
    from .sources import SourceLog


_FEWEST = 5  # below it the limits are infinite, or the normal approximation is none
_MOST = 1000  # points; the newest are taken


class Trend(NamedTuple):
    """A slope.

    Attributes:
        per_day: its value, in units of the quantity a day.
        low: lower confidence limit.
        high: upper.
        points: that it was made of.
    """

    per_day: float
    low: float
    high: float
    points: int

    @property
    def clear(self) -> bool:
        """Whether both limits lie on one side of zero."""
        return self.low > 0 or self.high < 0


def trend_of(points: Sequence[tuple[float, float]], confidence: float = 0.95) -> Trend | None:
    """Return the trend of (time in seconds, value) points; None for too few to say."""
    points = sorted(points)[-_MOST:]
    n = len(points)
    slopes = sorted(
        (b[1] - a[1]) / (b[0] - a[0]) * 86400.0
        for place, a in enumerate(points)
        for b in points[place + 1 :]
        if b[0] > a[0]
    )
    if n < _FEWEST or not slopes:
        return None
    ties = sum(
        t * (t - 1) * (2 * t + 5)
        for values in (Counter(p[0] for p in points), Counter(p[1] for p in points))
        for t in values.values()
    )
    variance = max(0.0, (n * (n - 1) * (2 * n + 5) - ties) / 18)
    reach = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(variance)
    low = math.floor((len(slopes) - reach) / 2) - 1
    high = math.ceil((len(slopes) + reach) / 2)
    return Trend(
        median(slopes),
        slopes[low] if low >= 0 else -math.inf,
        slopes[high] if high < len(slopes) else math.inf,
        n,
    )


UNKNOWN = "unknown"
# Of all limits.
_CONFIDENCE = 0.95
# A straggler's median step is at least this much slower than that of the median rank, and lies
# this far from it in robust standard deviations (Iglewicz and Hoaglin, 1993: 3.5).
_SLOWER, _FAR = 1.05, 3.5
# A node is named as one that fails too often at this level, over all nodes together.
_ODD = 0.05


@dataclass(frozen=True, slots=True)
class Rate:
    """How often one thing failed.

    Attributes:
        name: of the class, component or node.
        incidents: their number.
        exposed: those that struck while the job could fail; only they count towards the rate.
        per_second: the rate; None where no log says for how long.
        low: its lower confidence limit.
        high: its upper.
    """

    SAID = ("mtbf_s",)

    name: str
    incidents: int
    exposed: int
    per_second: float | None = field(metadata=said_as("per_s"))
    low: float | None = field(metadata=said_as("low_per_s"))
    high: float | None = field(metadata=said_as("high_per_s"))

    @property
    def mtbf_s(self) -> float | None:
        """Mean seconds between such failures; None without any."""
        return 1 / self.per_second if self.per_second else None


@dataclass(frozen=True, slots=True)
class RankPace:
    """The steps of one rank.

    Attributes:
        rank: its number.
        steps: their number.
        p50: median seconds of a step.
        p99: seconds that 99 % of them do not exceed.
        straggler: whether it is far slower than the others.
    """

    rank: int
    steps: float
    p50: float
    p99: float
    straggler: bool


@dataclass(frozen=True, slots=True)
class RecoveryTimes:
    """How long training was away after failures.

    Attributes:
        until: what it was measured to; incidents measured to something else are left out.
        count: of incidents.
        mean_s: mean.
        median_s: median.
        p90_s: nine of ten took no longer.
        total_s: of all together.
        trend: None for too few to say.
    """

    until: Until
    count: int
    mean_s: float
    median_s: float
    p90_s: float
    total_s: float
    trend: Trend | None


@dataclass(frozen=True, slots=True)
class Steps:
    """Durations of steps over all ranks; see `Durations` for their precision.

    Attributes:
        count: of steps.
        p50_s: median.
        p99_s: 99 % took no longer.
        ranks: the same by rank, for ranks that the logs name.
        dropped: whether there were more ranks than are told apart.
    """

    SAID: ClassVar = {"stragglers": "straggler_numbers"}

    count: float
    p50_s: float
    p99_s: float
    ranks: tuple[RankPace, ...]
    dropped: bool = field(metadata=said_as("ranks_dropped"))

    @property
    def stragglers(self) -> tuple[RankPace, ...]:
        """Ranks that are far slower than the others."""
        return tuple(one for one in self.ranks if one.straggler)

    @property
    def straggler_numbers(self) -> list[int]:
        """Numbers of the ranks that are far slower than the others."""
        return [one.rank for one in self.stragglers]


@dataclass(frozen=True, slots=True)
class Wasted:
    """Work that was done and lost.

    Attributes:
        steps: that had to be done again, over all incidents where that is known.
        seconds: that they had taken; None where no log says how long a step is.
        incidents: of which it is known.
        unknown: of which it is not.
    """

    steps: int
    seconds: float | None
    incidents: int
    unknown: int


@dataclass(frozen=True, slots=True)
class Lemon:
    """A node that fails more often than chance explains.

    Attributes:
        node: its name.
        incidents: their number.
        expected: if all nodes were alike.
        chance: that some node has this many, if all are alike.
    """

    node: str
    incidents: int
    expected: float
    chance: float


@dataclass(frozen=True)
class IncidentReport:
    """What the logs of a run say.

    Attributes:
        incidents: in the order of their times.
        survived: signs of failures that training survived.
        confidence: of all limits.
        began: time of the first entry; None without times.
        ended: of the last.
        exposed_s: seconds in which the job could fail; None where no log says it.
        total: all incidents together.
        classes, components, nodes: the same divided, the most frequent first; `unknown` for what no
            log says.
        lemons: nodes that fail too often.
        nodes_known: number of nodes, as given, else as named in the logs.
        recovery: None where nothing says when training continued.
        steps: None without any.
        wasted: None where no log shows which steps were done again.
        planned: number of ends that were no failure.
        collection: what the logs say besides.
        logs: the files that were read.
        ignored: number of events that are of no known kind.
        side_by_side: number of jobs that ran at the same time.
    """

    incidents: tuple[Incident, ...]
    survived: tuple[Incident, ...]
    confidence: float
    began: float | None
    ended: float | None
    exposed_s: float | None
    total: Rate
    classes: tuple[Rate, ...]
    components: tuple[Rate, ...]
    nodes: tuple[Rate, ...]
    lemons: tuple[Lemon, ...]
    nodes_known: int | None
    recovery: RecoveryTimes | None
    steps: Steps | None
    wasted: Wasted | None
    planned: int = field(metadata=said_as("planned_ends"))
    collection: Collection = field(repr=False, metadata=UNSAID)
    logs: tuple[SourceLog, ...] = ()
    ignored: int = 0
    side_by_side: int = field(default=1, metadata=UNSAID)

    @property
    def code(self) -> ExitCode:
        """Whether the logs say anything, and were read to their end."""
        if self.logs and not any(log.entries for log in self.logs):
            return ExitCode.NOT_FOUND
        return ExitCode.PARTIAL if self.cut else ExitCode.OK

    @property
    def message(self) -> str:
        """What is wrong with the logs, or ""."""
        if self.code is ExitCode.NOT_FOUND:
            return f"{counted(len(self.logs), 'log')} read, and no line says anything that is known"
        return "" if self.cut is None else f"{self.cut.path} ends too early: {self.cut.cut}"

    @property
    def cut(self) -> SourceLog | None:
        """The first log that ends too early."""
        return next((log for log in self.logs if log.cut), None)


def report_of(
    collections: Sequence[Collection],
    together: float,
    *,
    detect: float | None = None,
    restart: float | None = None,
    nodes: int | None = None,
) -> IncidentReport:
    """Return what the logs say of one run, or of several jobs whose times add up.

    Args:
        collections: of each job; the first has the logs of trainers.
        together: seconds within which lines may be of one failure.
        detect: seconds until failures were noticed that record none; default: the others' mean.
        restart: the same for restarts.
        nodes: number of nodes; default: those that the logs name.
    """
    incidents: list[Incident] = []
    survived: list[Incident] = []
    exposed_s = 0.0
    for collection in collections:
        found, none = incidents_of(collection, together)
        exposed_s += _expose(collection, found, detect, restart)
        incidents += found
        survived += none
    incidents.sort(key=lambda one: (one.time is None, one.time or 0.0))
    seconds = exposed_s or None

    def rate(name: str, some: Sequence[Incident]) -> Rate:
        exposed = sum(one.exposed for one in some)
        if seconds is None:
            return Rate(name, len(some), exposed, None, None, None)
        low, high = mean_limits(exposed, _CONFIDENCE)
        return Rate(name, len(some), exposed, exposed / seconds, low / seconds, high / seconds)

    def by(key: Callable[[Incident], str]) -> tuple[Rate, ...]:
        groups: dict[str, list[Incident]] = {}
        for one in incidents:
            groups.setdefault(key(one) or UNKNOWN, []).append(one)
        return tuple(
            rate(name, some)
            for name, some in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
        )

    times = [one.times for one in collections if one.times is not None]
    by_node = by(lambda one: one.node)
    known = nodes or len({name for one in collections for name in one.nodes}) or None
    first = collections[0]
    steps = _steps(first)
    return IncidentReport(
        incidents=tuple(incidents),
        survived=tuple(survived),
        confidence=_CONFIDENCE,
        began=min((one[0] for one in times), default=None),
        ended=max((one[1] for one in times), default=None),
        exposed_s=seconds,
        total=rate("all", incidents),
        classes=by(lambda one: one.fault.name),
        components=by(lambda one: one.fault.component),
        nodes=by_node,
        lemons=_lemons(by_node, known),
        nodes_known=known,
        recovery=_recovery(incidents),
        steps=steps,
        wasted=_wasted(incidents, steps),
        planned=sum(1 for one in collections for end in one.ends if end.planned),
        collection=first,
    )


def _expose(
    collection: Collection,
    incidents: Sequence[Incident],
    detect: float | None,
    restart: float | None,
) -> float:
    """Return how long a job could fail, and mark the incidents that struck in that time."""
    events = [LogEvent("failure", one.time, *_down(one)) for one in incidents]
    events += [LogEvent("start", one.time) for one in collection.starts]
    events += [LogEvent("end", one.time) for one in collection.ends]
    events += [LogEvent("save", time) for time, _, _ in collection.saves]
    for stretch in collection.stretches:
        events += [LogEvent("step", stretch.began), LogEvent("step", stretch.ended)]
    timed = any(event.time is not None for event in events)
    exposed, counted = exposure(events, detect=detect, restart=restart)
    for incident, counts in zip(incidents, counted, strict=False):
        incident.exposed = counts
    return exposed.seconds if timed else 0.0


def _down(incident: Incident) -> tuple[float | None, float | None]:
    """Return detection and restart; what was measured to the next step is all of both."""
    if incident.until is Until.STEP or incident.away_s is not None:
        return 0.0, incident.recovery_s if incident.away_s is None else incident.away_s
    return incident.detect_s, incident.restart_s


def _recovery(incidents: Sequence[Incident]) -> RecoveryTimes | None:
    measured: dict[Until, list[Incident]] = {}
    for one in incidents:
        if one.until is not None:
            measured.setdefault(one.until, []).append(one)
    if not measured:
        return None
    until = max(measured, key=lambda which: len(measured[which]))
    seconds = sorted(one.recovery_s or 0.0 for one in measured[until])
    points = [(one.time, one.recovery_s or 0.0) for one in measured[until] if one.time is not None]
    return RecoveryTimes(
        until,
        len(seconds),
        fmean(seconds),
        median(seconds),
        seconds[min(len(seconds) - 1, int(0.9 * len(seconds)))],
        sum(seconds),
        trend_of(points, _CONFIDENCE),
    )


def _steps(collection: Collection) -> Steps | None:
    p50, p99 = collection.steps.quantile(0.5), collection.steps.quantile(0.99)
    if p50 is None or p99 is None:
        return None
    own = {
        rank: (durations.quantile(0.5) or 0.0, durations.quantile(0.99) or 0.0, durations.count)
        for rank, durations in sorted(collection.by_rank.items())
        if durations.count
    }
    middle = median(one[0] for one in own.values()) if own else 0.0
    spread = median(abs(one[0] - middle) for one in own.values()) / 0.6745 if own else 0.0
    ranks = tuple(
        RankPace(
            rank,
            count,
            half,
            most,
            len(own) >= 3 and half > _SLOWER * middle and half - middle > _FAR * spread,
        )
        for rank, (half, most, count) in own.items()
    )
    return Steps(collection.steps.count, p50, p99, ranks, collection.ranks_dropped)


def _wasted(incidents: Sequence[Incident], steps: Steps | None) -> Wasted | None:
    known = [one.rewound for one in incidents if one.rewound is not None]
    if not known:
        return None
    redone = sum(known)
    return Wasted(
        redone,
        None if steps is None else redone * steps.p50_s,
        len(known),
        len(incidents) - len(known),
    )


def _lemons(rates: Sequence[Rate], known: int | None) -> tuple[Lemon, ...]:
    """Return the nodes with more incidents than chance explains, Bonferroni's way.

    If all nodes were alike, each would have the mean number. A node stands out where the chance
    that any of them has this many is below 5 % (compare "lemon nodes" in Kokolis et al., HPCA
    2025).
    """
    named = [one for one in rates if one.name != UNKNOWN]
    if known is None or known < 2 or not named:
        return ()
    expected = sum(one.incidents for one in named) / max(known, len(named))
    found = []
    for one in named:
        chance = min(1.0, max(known, len(named)) * at_least(one.incidents, expected))
        if one.incidents >= 2 and chance < _ODD:
            found.append(Lemon(one.name, one.incidents, expected, chance))
    return tuple(found)
