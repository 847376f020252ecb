"""Many runs of one job, side by side, from failure to failure.

Long runs: goodput over many failures, from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftckpt.planning.models.spot import Preemption
from ftckpt.progress import NULL, Counter

from .laws import Exponential, Law
from .timeline import Clock, TimeLedger, Timeline

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .laws import Floats, Sampler


@dataclass(frozen=True, slots=True)
class Recovery:
    """The recovery from failures.

    Attributes:
        detect: seconds in which nothing fails.
        restarts: seconds to restart from each tier; begun anew when a failure interrupts it.
        shares: share of failures for which each tier is the first that survives.
        spans: number of saves between two that go into each tier.
    """

    detect: float
    restarts: tuple[float, ...]
    shares: tuple[float, ...] = (1.0,)
    spans: tuple[int, ...] = (1,)


class Jobs:
    """The state of all runs: how far each has come, and which tier it restarts from.

    Attributes:
        ledger: where the time went.
        place: saves since the beginning that each run could go back to. With one tier all saves are
            equal, and are not counted unless `keep_place`.
        need: seconds that each run must restart before it runs.
        several: whether there is more than one tier.
    """

    def __init__(
        self, timeline: Timeline, recovery: Recovery, runs: int, *, keep_place: bool = False
    ) -> None:
        import numpy as np

        self.clock = Clock(timeline)
        self.ledger = TimeLedger(runs)
        self.place = np.zeros(runs, dtype=np.int64)
        self.need: Floats = np.full(runs, recovery.restarts[0])
        self._tier = np.zeros(runs, dtype=np.int64)
        self._restarts = np.array(recovery.restarts)
        self._spans = np.array(recovery.spans, dtype=np.int64)
        self._limits = np.cumsum(recovery.shares)[:-1]
        self._detect = recovery.detect
        self.several = len(recovery.restarts) > 1
        self._keep_place = keep_place or self.several

    def causes(self, rng: np.random.Generator, rows: int) -> npt.NDArray[np.int64] | None:
        """Draw the tier that each failure needs, one row per event; None with one tier."""
        import numpy as np

        if not self.several:
            return None
        return np.searchsorted(
            self._limits, rng.random((rows, len(self.place))), side="right"
        ).astype(np.int64)

    def fail(self, gap: Floats, cause: npt.NDArray[np.int64] | None) -> None:
        """Let each run restart and run for `gap` seconds, and then fail and be detected."""
        import numpy as np

        ledger, clock = self.ledger, self.clock
        restarted = np.minimum(gap, self.need)
        running = gap - restarted
        runs = gap > self.need
        # During an interrupted restart no save becomes durable, however short saves are.
        saves = clock.durable(self.place, running) * runs
        ledger.restart += restarted
        ledger.lost += running - clock.seconds(self.place, saves)
        ledger.useful += saves * clock.work
        ledger.save += clock.stalled(self.place, saves)
        ledger.waiting += clock.waited(self.place, saves)
        ledger.segments += int(saves.sum()) + int(np.count_nonzero(runs))
        if self._keep_place:
            self.place += saves
            if cause is not None:
                self._tier = np.where(runs, cause, np.maximum(self._tier, cause))
                self._go_back(self.place % self._spans[self._tier])
            self.need = self._restarts[self._tier]
        ledger.detection += self._detect
        ledger.wall += gap + self._detect

    def interrupt(
        self, gap: Floats, announced: npt.NDArray[np.bool_], spoilt: Floats, emergency: float
    ) -> None:
        """Let each run restart and run for `gap` seconds, and then fail or be preempted.

        Args:
            gap: seconds until it is interrupted.
            announced: whether that is a preemption with time enough to save.
            spoilt: seconds after it until another event ends a save.
            emergency: seconds of a save then.
        """
        import numpy as np

        ledger, clock = self.ledger, self.clock
        restarted = np.minimum(gap, self.need)
        running = gap - restarted
        runs = gap > self.need
        saving = np.where(announced & runs, np.minimum(spoilt, emergency), 0.0)
        rescued = announced & runs & (spoilt >= emergency)
        saves = clock.durable(self.place, running) * runs
        done, waited = clock.progress(running)
        kept = clock.seconds(self.place, saves)
        ledger.restart += restarted
        ledger.useful += np.where(rescued, done, saves * clock.work)
        ledger.waiting += np.where(rescued, waited, clock.waited(self.place, saves))
        ledger.save += np.where(
            rescued, running - done - waited + saving, clock.stalled(self.place, saves)
        )
        ledger.lost += np.where(rescued, 0.0, running - kept + saving)
        ledger.segments += int(saves.sum()) + int(np.count_nonzero(runs))
        ledger.detection += self._detect
        ledger.wall += gap + saving + self._detect

    def _go_back(self, saves: npt.NDArray[np.int64]) -> None:
        """Lose the newest saves of each run that its restart tier does not have."""
        ledger, clock = self.ledger, self.clock
        self.place -= saves
        ledger.lost += clock.seconds(self.place, saves)
        ledger.useful -= saves * clock.work
        ledger.save -= clock.stalled(self.place, saves)
        ledger.waiting -= clock.waited(self.place, saves)


ROWS = 128  # events drawn at once: few calls, and small enough to stay in the cache


def run(jobs: Jobs, law: Law, failures: int, rng: np.random.Generator, counter: Counter) -> None:
    """Simulate every run through a number of failures.

    Each begins with a restart and ends after a failure and its detection, so all failures are
    alike. With several tiers a rare failure may still destroy the newest work: a tenth as many
    failures run first, so that the beginning is at as much risk as the end.
    """
    draw = law.sampler(rng, len(jobs.place))
    if jobs.several:
        _fail(jobs, draw, -(-failures // 10), rng, NULL)
        jobs.ledger.clear()
    _fail(jobs, draw, failures, rng, counter)
    jobs.ledger.check()


def _fail(
    jobs: Jobs, draw: Sampler, failures: int, rng: np.random.Generator, counter: Counter
) -> None:
    for first in range(0, failures, ROWS):
        rows = min(ROWS, failures - first)
        gaps, causes = draw(rows), jobs.causes(rng, rows)
        for row in range(rows):
            jobs.fail(gaps[row], None if causes is None else causes[row])
        counter.add(rows * len(jobs.place))


def run_preempted(
    jobs: Jobs,
    law: Law,
    preemption: Preemption,
    emergency: float,
    interruptions: int,
    rng: np.random.Generator,
    counter: Counter,
) -> None:
    """Simulate every run through a number of failures and preemptions.

    A preemption that is announced early enough stops the work for a save of `emergency` seconds,
    which a failure or an unannounced preemption may still spoil.
    """
    import numpy as np

    runs = len(jobs.place)
    draw = law.sampler(rng, runs)
    takes = Exponential(1 / preemption.rate).sampler(rng, runs)
    untold = preemption.rate * (1 - preemption.reliability)
    surprises = Exponential(1 / untold).sampler(rng, runs) if untold else None
    for first in range(0, interruptions, ROWS):
        rows = min(ROWS, interruptions - first)
        gaps, taken = draw(rows), takes(rows)
        told = (taken < gaps) & (rng.random((rows, runs)) < preemption.reliability)
        told &= emergency <= preemption.notice
        gaps = np.minimum(gaps, taken)
        # Events during the save; the failure clock is as new, like everything at an event.
        spoilt = draw(rows)
        if surprises is not None:
            spoilt = np.minimum(spoilt, surprises(rows))
        for row in range(rows):
            jobs.interrupt(gaps[row], told[row], spoilt[row], emergency)
        counter.add(rows * runs)
    jobs.ledger.check()
