"""Runs of a job with failures: an independent check of the closed forms, and more than they know.

    from ftckpt.planning.models.inputs import Costs
    from ftckpt.planning.models import exact
    from ftckpt.planning import simulation

    found = simulation.simulate(1350.0, Costs(120.0, restart=300.0), simulation.Exponential(7200.0))
    simulation.agreement(exact.outcome(1350.0, 120.0, 7200.0, restart=300.0).useful, found)

Times between failures are drawn from a law, and what happens until then is looked up on a timeline
that was walked through event by event: work, waiting, snapshot, flush. Nothing is shared with the
closed forms but the records in `inputs`. Every second goes to an account, and the accounts must add
up to the wall time to 1e-9. Runs are computed side by side in numpy, failure by failure.

The platform is as new after each failure; failures strike restarts too, but not detection.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ftckpt.errors import UsageError
from ftckpt.planning.models.arithmetic import require
from ftckpt.planning.models.inputs import Costs, Pattern, Preemption, shares
from ftckpt.progress import NULL, Counter

from . import completion, steady, timeline
from .jobs import Jobs, Recovery
from .laws import Exponential, Law, Lognormal, Trace, Weibull
from .result import Agreement, Completion, Simulated, agreement, completed, summarised

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "Agreement",
    "Completion",
    "Exponential",
    "Law",
    "Lognormal",
    "Simulated",
    "Trace",
    "Weibull",
    "agreement",
    "complete",
    "simulate",
    "simulate_tiers",
]

_MOST_SAVES = 1_000_000  # of one pattern: its table is held in memory


def simulate(
    interval: float,
    costs: Costs,
    law: Law,
    *,
    preemption: Preemption | None = None,
    runs: int = 40,
    failures: int = 1000,
    seed: int = 0,
    counter: Counter = NULL,
) -> Simulated:
    """Simulate long runs that save after every `interval` seconds of work.

    Args:
        interval: tau, seconds of useful work between two saves, > 0; where it is shorter than the
            flush leaves room for, the simulated job waits.
        costs: of a save and a failure.
        law: of the times between failures.
        preemption: machines taken away besides; announced ones are answered by a save that takes
            snapshot and flush. They count as failures in `failures`.
        runs: independent runs, >= 2.
        failures: of each run, >= 1.
        seed: of the random numbers; the same seed gives the same result.
        counter: is told of failures done.

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    require("the interval", interval, above=0)
    rng = _generator(runs, failures, seed)
    jobs = Jobs(timeline.of_costs(interval, costs), Recovery(costs.detect, (costs.restart,)), runs)
    counter.start("simulate", runs * failures, "failures")
    if preemption is None or not preemption.rate:
        steady.run(jobs, law, failures, rng, counter)
    else:
        emergency = costs.save + costs.flush
        steady.run_preempted(jobs, law, preemption, emergency, failures, rng, counter)
    return summarised(jobs.ledger, interval, law.name, failures)


def simulate_tiers(
    pattern: Pattern,
    law: Law,
    *,
    detect: float = 0.0,
    runs: int = 40,
    failures: int = 1000,
    seed: int = 0,
    counter: Counter = NULL,
) -> Simulated:
    """Simulate long runs that save to several tiers.

    Args:
        pattern: the tiers, the interval, and whole numbers of saves.
        law: of the times between failures of any class.
        detect: D, seconds after each failure, >= 0.
        runs: independent runs, >= 2.
        failures: of each run, >= 1.
        seed: of the random numbers; the same seed gives the same result.
        counter: is told of failures done.

    Raises:
        UsageError: an argument is out of range or not a number.
    """
    rng = _generator(runs, failures, seed)
    jobs = Jobs(_timeline(pattern), _recovery(pattern, detect), runs)
    counter.start("simulate", runs * failures, "failures")
    steady.run(jobs, law, failures, rng, counter)
    return summarised(jobs.ledger, float(pattern.interval), law.name, failures)


def complete(
    work: float,
    plan: tuple[float, Costs] | Pattern,
    law: Law,
    *,
    detect: float = 0.0,
    runs: int = 1000,
    seed: int = 0,
    counter: Counter = NULL,
) -> Completion:
    """Simulate a job of a given size from its beginning to its end.

    Args:
        work: useful seconds that it needs, > 0.
        plan: interval and costs, or a pattern of tiers.
        law: of the times between failures.
        detect: D, seconds after each failure, for a pattern; costs bring their own.
        runs: independent runs, >= 2.
        seed: of the random numbers; the same seed gives the same result.
        counter: is told of runs done.

    Raises:
        UsageError: an argument is out of range or not a number, or the job is not done after
            65,536 failures.
    """
    require("the work", work, above=0)
    rng = _generator(runs, 1, seed)
    if isinstance(plan, Pattern):
        line, recovery = _timeline(plan), _recovery(plan, detect)
    else:
        interval, costs = plan
        require("the interval", interval, above=0)
        line = timeline.of_costs(interval, costs)
        recovery = Recovery(costs.detect, (costs.restart,))
    counter.start("simulate", runs, "runs")
    jobs = Jobs(line, recovery, runs, keep_place=True)
    return completed(completion.run(jobs, line, law, work, rng, counter))


def _generator(runs: int, failures: int, seed: int) -> np.random.Generator:
    import numpy as np

    require("the number of runs", runs, at_least=2, unit="")
    require("the number of failures", failures, at_least=1, unit="")
    # Bit generator of its own: half again as fast as the default for exponential times.
    return np.random.Generator(np.random.SFC64(seed))


def _timeline(pattern: Pattern) -> timeline.Timeline:
    require("the interval", pattern.interval, above=0)
    for count in pattern.counts:
        require("the number of saves between two of the next tier", count, at_least=1, unit="")
        if count != int(count):
            raise UsageError(f"{count:g} saves between two of the next tier cannot be simulated")
    if math.prod(pattern.counts) > _MOST_SAVES:
        raise UsageError(f"a pattern of more than {_MOST_SAVES:,} saves cannot be simulated")
    return timeline.of_pattern(pattern)


def _recovery(pattern: Pattern, detect: float) -> Recovery:
    require("the detection time", detect, at_least=0)
    return Recovery(
        detect=detect,
        restarts=tuple(tier.restart for tier in pattern.tiers),
        shares=shares(pattern.tiers),
        spans=tuple(
            int(math.prod(pattern.counts[:number])) for number in range(len(pattern.tiers))
        ),
    )
