"""Long runs: goodput over many failures, from one to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.planning.models.inputs import Preemption
from ftckpt.progress import NULL, Counter

from .jobs import Jobs
from .laws import Exponential, Law

if TYPE_CHECKING:
    import numpy as np

    from .laws import Sampler

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
