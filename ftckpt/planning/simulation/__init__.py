"""Simulate a job with failures: an independent check of the closed forms, and more general.

    from ftckpt.planning.models.spot import Costs
    from ftckpt.planning.models import exact
    from ftckpt.planning import simulation

    found = simulation.simulate(1350.0, Costs(120.0, restart=300.0), simulation.Exponential(7200.0))
    simulation.agreement(exact.outcome(1350.0, 120.0, 7200.0, restart=300.0).useful, found)

Times between failures are drawn from a law, and the events until then come from a timeline: work,
waiting, snapshot, flush. The simulation shares only the records in `inputs` with the closed forms.
Every second goes to an account, and the accounts must add up to the wall time to 1e-9. Runs are
computed side by side in numpy, failure by failure.

The platform is as new after each failure; failures also strike restarts, but not detection.

Every function takes `runs` >= 2 independent runs, a `seed` (the same seed gives the same result),
and raises UsageError for an argument that is out of range or not a number.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ftckpt.errors import UsageError
from ftckpt.planning.models.arithmetic import require
from ftckpt.planning.models.spot import Costs, Pattern, Preemption, shares
from ftckpt.progress import NULL, Counter

from . import jobs as steady
from . import result, silent, timeline
from .jobs import Jobs, Recovery
from .laws import AgeingParts, Exponential, Fleet, Law, Lognormal, Trace, Weibull
from .result import Agreement, Completion, Simulated, agreement, completed, summarised
from .silent import SilentJob

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "AgeingParts",
    "Agreement",
    "Completion",
    "Exponential",
    "Fleet",
    "Law",
    "Lognormal",
    "SilentJob",
    "Simulated",
    "Trace",
    "Weibull",
    "agreement",
    "complete",
    "simulate",
    "simulate_silent",
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

    If the interval is shorter than the flush allows, the simulated job waits. A save of snapshot
    and flush answers each announced `preemption`; preemptions count in `failures` (of each run, >=
    1).
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
    """Simulate long runs that save to several tiers; the pattern's counts are whole numbers.

    `law` gives the times between failures of any class; `detect` is D, seconds after each.
    """
    rng = _generator(runs, failures, seed)
    jobs = Jobs(_timeline(pattern), _recovery(pattern, detect), runs)
    counter.start("simulate", runs * failures, "failures")
    steady.run(jobs, law, failures, rng, counter)
    return summarised(jobs.ledger, float(pattern.interval), law.name, failures)


def simulate_silent(
    job: SilentJob,
    law: Law,
    *,
    runs: int = 40,
    failures: int = 1000,
    seed: int = 0,
    counter: Counter = NULL,
) -> Simulated:
    """Simulate long runs with silent errors, verified before each save or noticed late.

    `failures` counts all returns to a save, after failures and after errors.
    """
    require("the interval", job.interval, above=0)
    rng = _generator(runs, failures, seed)
    counter.start("simulate", runs * failures, "failures")
    ledger, unreached = silent.run(job, law, runs, failures, rng, counter)
    found = summarised(ledger, job.interval, law.name, failures)
    return replace(found, unreached=unreached)


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
    """Simulate a job of `work` useful seconds (> 0) from its beginning to its end.

    `plan` is interval and costs, or a pattern of tiers; `detect` is for a pattern, because costs
    have their own. UsageError also if the job is not done after 65,536 failures.
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
    return completed(result.run(jobs, line, law, work, rng, counter))


def _generator(runs: int, failures: int, seed: int) -> np.random.Generator:
    import numpy as np

    require("the number of runs", runs, at_least=2, unit="")
    require("the number of failures", failures, at_least=1, unit="")
    # Its own bit generator: half again as fast as the default for exponential times.
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
