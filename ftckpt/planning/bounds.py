"""Check the limits that a plan must keep."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ftckpt.planning.models.outcome import Outcome

from .choose_model import Model, Spot
from .models import silent
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
