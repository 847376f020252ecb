"""Check the limits that a plan must hold to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ftckpt.planning.models.outcome import Outcome

from .choose_model import Model, Spot
from .models import silent
from .quantities import shown_duration

# The chance that is taken of finding a silent error only when every kept copy has it.
RISK = 0.01


class Constraint(NamedTuple):
    """One thing that must hold.

    Attributes:
        name: what it is about, stable: for scripts.
        ok: whether it holds.
        value: what the plan leads to.
        limit: what it may be at most, or at least where `name` says so.
        unit: `s`, `B`, `B/s`, "" for a fraction or a number.
        advice: what would make it hold; "" where it does.
    """

    name: str
    ok: bool
    value: float
    limit: float
    unit: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanBounds:
    """What was asked; None for nothing.

    Attributes:
        max_loss: seconds of work that a failure may cost at most.
        max_overhead: stall of a save for each second of work.
        host_ram: bytes of a host for staging snapshots.
        staged: bytes that the ranks of a host hold of snapshots, all buffers together.
        keep_last: checkpoints that are kept.
        detection_latency: mean seconds for which a silent error stays unseen.
        storage_bw: bytes a second that storage takes.
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

        A loss that even the flush exceeds allows no interval; it is left to `check` to say so.
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
    """Yield what holds and what does not at the interval of `outcome`.

    Args:
        model: the job.
        outcome: at the interval that is advised.
        limits: what was asked.
        nbytes: of a checkpoint, where known.
    """
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
