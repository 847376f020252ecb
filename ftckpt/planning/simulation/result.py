"""Summarise simulated runs, and compare them with the closed form.

A job of a given size: the distribution of its time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ftckpt.errors import UsageError
from ftckpt.planning.models.arithmetic import require
from ftckpt.planning.models.weights_alone import with_pauses
from ftckpt.planning.models.young_daly import Outcome
from ftckpt.progress import Counter

from .jobs import ROWS, Jobs
from .laws import Law
from .timeline import TimeLedger, Timeline

if TYPE_CHECKING:
    import numpy as np


_MOST_ERRORS = 4.0  # standard errors; by chance one run in 16,000 is further off


@dataclass(frozen=True, slots=True)
class Simulated:
    """Long runs, many failures each.

    Attributes:
        outcome: shares of the wall time of all runs together; `outcome.useful` is the mean goodput.
        error: standard error of the mean goodput.
        spread: standard deviation of the goodput of single runs.
        p10: a tenth of the runs has less goodput; p90: a tenth has more.
        failures: of all runs together, preemptions included.
        segments: bulks of work that were begun, in all runs.
        seconds: wall time, in all runs.
        law: of the times between failures.
        unreached: share of silent errors that were noticed when every kept copy had them; None
            where none was noticed late.
    """

    outcome: Outcome
    error: float
    spread: float
    p10: float
    p90: float
    runs: int
    failures: int
    segments: int
    seconds: float
    law: str
    unreached: float | None = None

    @property
    def mean(self) -> float:
        """Mean goodput."""
        return float(self.outcome.useful)

    def with_pauses(self, period: float, pauses: float) -> Simulated:
        """Return it for a period of work with pauses in it; it was simulated with both as work."""
        share = period / (period + pauses)
        return replace(
            self,
            outcome=with_pauses(lambda _: self.outcome, period, pauses),
            error=self.error * share,
            spread=self.spread * share,
            p10=self.p10 * share,
            p90=self.p90 * share,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """Runs of a job of a given size, in seconds of wall time.

    Attributes:
        mean: mean time to finish.
        error: its standard error.
        spread: standard deviation of single runs.
        p10: a tenth of the runs is faster; p50: half of them; p90: all but a tenth.
        goodput: work of all runs over their time.
    """

    mean: float
    error: float
    spread: float
    p10: float
    p50: float
    p90: float
    runs: int
    goodput: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Whether a closed form and a simulation agree.

    Attributes:
        closed: goodput by the closed form.
        simulated: mean goodput by the simulation.
        error: standard error of the latter.
        z: their difference (simulated minus closed) in standard errors.
        agrees: whether they are within four of them.
        sentence: the verdict in words.
    """

    closed: float
    simulated: float
    error: float
    z: float
    agrees: bool
    sentence: str


def agreement(closed: float, simulated: Simulated) -> Agreement:
    """Compare a closed form's goodput, a fraction, with a simulation of the same job.

    Raises:
        UsageError: the goodput is not a number.
    """
    require("the goodput", closed, at_most=1, unit="")
    gap = simulated.mean - closed
    # Without any spread, rounding alone would separate them.
    error = max(simulated.error, 1e-12)
    z = gap / error
    agrees = abs(z) <= _MOST_ERRORS
    verdict = "agree" if agrees else "disagree"
    return Agreement(
        closed=closed,
        simulated=simulated.mean,
        error=simulated.error,
        z=z,
        agrees=agrees,
        sentence=(
            f"closed form and simulation {verdict}: {closed:.3%} and {simulated.mean:.3%} "
            f"± {simulated.error:.3%}, {abs(z):.1f} standard errors apart"
        ),
    )


def summarised(ledger: TimeLedger, interval: float, law: str, failures: int) -> Simulated:
    """Summarise the ledger of long runs.

    The mean is useful time over wall time of all runs, so each run is weighted by its time, with
    the standard error of such a ratio.
    """
    import numpy as np

    wall = float(ledger.wall.sum())
    runs = len(ledger.wall)
    mean = float(ledger.useful.sum()) / wall
    scatter = ledger.useful - mean * ledger.wall
    each = ledger.useful / ledger.wall
    p10, p90 = np.quantile(each, (0.1, 0.9))
    return Simulated(
        outcome=Outcome(
            model=f"simulation, {law}",
            interval=interval,
            useful=mean,
            save=float(ledger.save.sum()) / wall,
            lost=float(ledger.lost.sum()) / wall,
            detection=float(ledger.detection.sum()) / wall,
            restart=float(ledger.restart.sum()) / wall,
            waiting=float(ledger.waiting.sum()) / wall,
        ),
        error=float(scatter.std(ddof=1)) * math.sqrt(runs) / wall,
        spread=float(each.std(ddof=1)),
        p10=float(p10),
        p90=float(p90),
        runs=runs,
        failures=runs * failures,
        segments=ledger.segments,
        seconds=wall,
        law=law,
    )


def completed(ledger: TimeLedger) -> Completion:
    """Summarise the ledger of finished jobs."""
    import numpy as np

    wall = ledger.wall
    p10, p50, p90 = (float(x) for x in np.quantile(wall, (0.1, 0.5, 0.9)))
    spread = float(wall.std(ddof=1))
    return Completion(
        mean=float(wall.mean()),
        error=spread / math.sqrt(len(wall)),
        spread=spread,
        p10=p10,
        p50=p50,
        p90=p90,
        runs=len(wall),
        goodput=float(ledger.useful.sum() / wall.sum()),
    )


MOST_FAILURES = 1 << 16


def run(
    jobs: Jobs,
    timeline: Timeline,
    law: Law,
    work: float,
    rng: np.random.Generator,
    counter: Counter,
) -> TimeLedger:
    """Run until every run has done so much work; return where the time went.

    `jobs` must keep places. Finished runs continue until the last one is done, and are ignored.

    Raises:
        UsageError: a run is not done after `MOST_FAILURES`.
    """
    import numpy as np

    clock, runs = jobs.clock, len(jobs.place)
    bulks = math.ceil(work / timeline.work * (1 - 1e-12))
    rest = work - (bulks - 1) * timeline.work  # after the last needed save
    alone, behind = timeline.first.time_of(rest), timeline.cycle[0].time_of(rest)
    jobs.need = np.zeros(runs)  # there is nothing to restart from yet
    final, waits = TimeLedger(runs), np.ones(runs, dtype=bool)
    draw = law.sampler(rng, runs)
    for _ in range(0, MOST_FAILURES, ROWS):
        gaps, causes = draw(ROWS), jobs.causes(rng, ROWS)
        for row in range(ROWS):
            saves = bulks - 1 - jobs.place
            tail = np.where(saves > 0, behind, alone)
            needed = jobs.need + clock.seconds(jobs.place, saves) + tail
            done = waits & (gaps[row] >= needed)
            if done.any():
                counter.add(int(np.count_nonzero(done)))
                waits &= ~done
                final.copy(jobs.ledger, done)
                final.wall[done] += needed[done]
                final.restart[done] += jobs.need[done]
                final.useful[done] += saves[done] * timeline.work + rest
                final.save[done] += (clock.stalled(jobs.place, saves) + tail - rest)[done]
                final.waiting[done] += clock.waited(jobs.place, saves)[done]
                if not waits.any():
                    final.segments = jobs.ledger.segments
                    final.check()
                    return final
            jobs.fail(gaps[row], None if causes is None else causes[row])
    raise UsageError(
        f"the job is not done after {MOST_FAILURES:,} failures: it hardly comes forward",
        hint="simulate a long run without an end, or save at another interval",
    )
