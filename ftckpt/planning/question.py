"""The question that a plan answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from .bounds import PlanBounds
from .choose_model import Model
from .failures import Failures
from .models.outcome import Outcome
from .models.weights_alone import with_pauses


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
