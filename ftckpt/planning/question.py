"""The question that a plan answers.

Check the limits that a plan must keep.

Combine known failure rates, with error bars.

Confidence limits of counted failures carry over to every result; a given rate counts as exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ftckpt.errors import UsageError

from . import rates
from .choose_model import Model, Spot
from .models import silent
from .models.weights_alone import with_pauses
from .models.young_daly import Outcome
from .quantities import shown_duration

# Accepted chance of finding a silent error only when every kept copy has it.
RISK = 0.01


class Constraint(NamedTuple):
    """One condition of a plan.

    Attributes:
        name: stable, for scripts.
        ok: whether it holds.
        value: of the plan.
        limit: the most, or the least if `name` says so.
        unit: `s`, `B`, `B/s`, "" for a fraction or a number.
        advice: a remedy; "" if it holds.
    """

    name: str
    ok: bool
    value: float
    limit: float
    unit: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanBounds:
    """The requested limits; None for none.

    Attributes:
        max_loss: seconds of work that a failure may cost.
        max_overhead: stall of a save per second of work.
        host_ram: bytes of a host for staging snapshots.
        staged: bytes of snapshots that a host's ranks hold, all buffers together.
        keep_last: number of kept checkpoints.
        detection_latency: mean seconds until a silent error is noticed.
        storage_bw: bytes per second that storage accepts.
    """

    max_loss: float | None = None
    max_overhead: float | None = None
    host_ram: float | None = None
    staged: float | None = None
    keep_last: int = 1
    detection_latency: float | None = None
    storage_bw: float | None = None

    def window(self, model: Model) -> tuple[float, float]:
        """Return the shortest and the longest interval that the limits and the model allow.

        A loss that even the flush exceeds is left to `check` to report.
        """
        low, high = model.least_interval, math.inf
        if self.max_overhead:
            low = max(low, model.stall / self.max_overhead)
        if self.max_loss is not None:
            left = self.max_loss - (model.durable - model.stall)
            high = left if left > 0 else math.inf
        return low, high


def check(
    model: Model, outcome: Outcome, limits: PlanBounds, nbytes: float | None
) -> Iterator[Constraint]:
    """Yield each condition at the interval of `outcome`; `nbytes` is a checkpoint's size."""
    interval = float(outcome.interval)
    period = interval + model.stall
    flush = model.durable - model.stall
    if flush > 0:
        fits = interval >= model.least_interval * (1 - 1e-9)
        least = shown_duration(model.least_interval)
        yield Constraint(
            "flush fits the period",
            fits,
            model.durable,
            period,
            "s",
            "" if fits else f"saves wait for each other below {least}",
        )
    if isinstance(model, Spot):
        notice = model.preemption.notice
        fits = model.durable <= notice
        advice = "" if fits else "a preemption loses work like any failure: save faster"
        yield Constraint("save fits the notice", fits, model.durable, notice, "s", advice)
    if limits.max_loss is not None:
        loss = interval + flush
        fits = loss <= limits.max_loss * (1 + 1e-9)
        advice = "" if fits else "only faster saves allow more frequent ones"
        yield Constraint("work at risk", fits, loss, limits.max_loss, "s", advice)
    if limits.max_overhead is not None:
        overhead = model.stall / interval
        fits = overhead <= limits.max_overhead * (1 + 1e-9)
        allowed = limits.max_overhead * interval
        advice = "" if fits else f"a save may stop training for {shown_duration(allowed)} at most"
        yield Constraint("saving overhead", fits, overhead, limits.max_overhead, "", advice)
    if limits.host_ram is not None and limits.staged is not None:
        fits = limits.staged <= limits.host_ram
        advice = "" if fits else "fewer buffers, or more ranks that write"
        yield Constraint("host RAM", fits, limits.staged, limits.host_ram, "B", advice)
    if limits.detection_latency is not None:
        needed = silent.keep_last(RISK, period, limits.detection_latency)
        fits = limits.keep_last >= needed
        advice = "" if fits else f"--keep-last {needed} leaves a chance of {RISK:.0%}"
        yield Constraint("keep-last (at least)", fits, limits.keep_last, needed, "", advice)
    if limits.storage_bw is not None and nbytes is not None:
        needed_bw = nbytes / model.writing if model.writing > 0 else math.inf
        fits = needed_bw <= limits.storage_bw * (1 + 1e-9)
        advice = "" if fits else "the times given need more than the storage takes"
        yield Constraint("storage bandwidth", fits, needed_bw, limits.storage_bw, "B/s", advice)


@dataclass(frozen=True, slots=True)
class Counted:
    """Counted failures.

    Attributes:
        name: of the cause.
        failures: their number.
        seconds: of observation, for a job of the planned size.
        detect: seconds after each of them in which nothing else could fail.
        dispersion: by how much their number scatters more than a Poisson number (`poisson`); >= 1.
    """

    name: str
    failures: int
    seconds: float
    detect: float = 0.0
    dispersion: float = 1.0

    @property
    def exposed(self) -> float:
        """Return the seconds in which the job could fail.

        Raises:
            UsageError: there are none left.
        """
        exposed = self.seconds - self.failures * self.detect
        if exposed > 0:
            return exposed
        raise UsageError(
            f"the detection of {self.failures:,} failures, {shown_duration(self.detect)} each, "
            f"takes all of the {shown_duration(self.seconds)} in which they were counted",
            hint="check the units; --detect is the mean from a failure until it is noticed",
        )


@dataclass(frozen=True, slots=True)
class Failures:
    """All failures of a job.

    Attributes:
        rates: causes, the most frequent first, and their sum; burn-in included.
        confidence: of the limits; None without a count.
        low: failures per second at the lower limit.
        high: failures per second at the upper limit.
        dispersion: the largest of the counts: the limits are wider by its square root.
    """

    rates: rates.Rates
    confidence: float | None
    low: float
    high: float
    dispersion: float = 1.0

    @property
    def mtbf(self) -> float:
        """Mean seconds between failures."""
        return self.rates.mtbf

    @property
    def mtbf_limits(self) -> tuple[float, float]:
        """Mean seconds between failures at the limits, the shorter first."""
        return 1 / self.high, 1 / self.low if self.low > 0 else float("inf")


def combine(
    known: Sequence[rates.Cause],
    counted: Sequence[Counted] = (),
    *,
    burn_in: float = 1.0,
    confidence: float = 0.95,
) -> Failures:
    """Combine a job's failures; rates of independent causes add up.

    Args:
        known: causes with a given rate.
        counted: causes with counted failures.
        burn_in: factor on every rate, > 0.
        confidence: of the limits, in (0, 1).

    Raises:
        UsageError: no cause is given, none of them ever failed, or a number is out of range.
    """
    seen = [rates.observed(c.failures, c.exposed, confidence) for c in counted]
    # Counts in the same time are one count: a sum of Poisson numbers is one, and its limits are
    # closer together than those of its parts added up.
    together: dict[float, int] = {}
    for one in seen:
        together[one.seconds] = together.get(one.seconds, 0) + one.failures
    pooled = [rates.observed(number, time, confidence) for time, number in together.items()]
    found = [rates.Cause(c.name, o.per_second) for c, o in zip(counted, seen, strict=True)]
    causes = sorted([*known, *found], key=lambda cause: -cause.per_second)
    hint = "--gpus 16384 --gpu-mtbf 50000h, --mtbf 3.1h, --failures 419/54d, or --preset llama3"
    if not causes:
        raise UsageError("nothing says how often the job fails", hint=hint)
    total = rates.combine(causes, burn_in)
    if not total.per_second > 0:
        raise UsageError("nothing ever fails, so that nothing says how often to save", hint=hint)
    low = total.per_second - burn_in * sum(o.per_second - o.low for o in pooled)
    high = total.per_second + burn_in * sum(o.high - o.per_second for o in pooled)
    scatter = max((c.dispersion for c in counted), default=1.0)
    if scatter > 1 and low > 0:  # on the scale of factors, so that no limit is below zero
        wider = math.sqrt(scatter)
        low = total.per_second * (low / total.per_second) ** wider
        high = total.per_second * (high / total.per_second) ** wider
    return Failures(total, confidence if counted else None, low, high, scatter)


class IntervalRule(StrEnum):
    """Whose interval is used, and whose prediction is shown."""

    EXACT = "exact"
    YOUNG = "young"
    DALY = "daly"
    ETTR = "ettr"


class Remedy(NamedTuple):
    """A change of the job that its model does not know of.

    Attributes:
        change: in words.
        mtbf: factor on the mean time between failures.
        sooner: seconds by which a restart becomes shorter.
    """

    change: str
    mtbf: float = 1.0
    sooner: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """The inputs of a plan. Times in seconds, sizes in bytes; None for unknown.

    Attributes:
        model: the job.
        failures: with their error bars.
        rule: whose interval is used.
        interval: work between two saves, if the user chooses it.
        step: one training step.
        limits: must hold.
        nbytes: of a checkpoint.
        gpus: of the job.
        run: length of the run in wall time.
        keep_every: every such checkpoint is kept for good; 0 for none.
        milestones: number of other kept checkpoints.
        gpu_hour: price of one.
        tb_month: price of 10^12 bytes for a month.
        remedies: further improvements to be planned.
        pauses: of training between two saves, all together, for saves of the weights alone.
    """

    model: Model
    failures: Failures
    rule: IntervalRule = IntervalRule.EXACT
    interval: float | None = None
    step: float | None = None
    limits: PlanBounds = field(default_factory=PlanBounds)
    nbytes: float | None = None
    gpus: int | None = None
    run: float | None = None
    keep_every: int = 0
    milestones: int = 0
    gpu_hour: float | None = None
    tb_month: float | None = None
    remedies: tuple[Remedy, ...] = ()
    pauses: float = 0.0

    def outcome(self, interval: float, model: Model | None = None) -> Outcome:
        """Return what an interval brings, with the pauses in it; of this job, or a like one."""
        return with_pauses((model or self.model).outcome, interval, self.pauses)
