"""Compute a plan's storage and money. Prices are inputs in any currency."""

from __future__ import annotations

import math
from typing import NamedTuple

from ftckpt.planning.models.outcome import Outcome

from .models import storage
from .question import Question


class Upkeep(NamedTuple):
    """Storage for the saves.

    Attributes:
        period_s: wall time between two saves, failures aside.
        bytes_per_day: written.
        write_bytes_per_s: while a save is being written.
        saves: in the run; None without its length.
        kept: checkpoints at its end, at most.
        kept_bytes: their size.
    """

    period_s: float
    bytes_per_day: float
    write_bytes_per_s: float
    saves: int | None
    kept: int
    kept_bytes: float


class UpkeepCost(NamedTuple):
    """Costs in the currency of the prices; None without a price or a length.

    Attributes:
        gpu_per_day: of the whole job.
        waste_per_day: the part of it that is not useful work.
        run: GPU-hours of the run.
        run_waste: the part of it that is not useful work.
        storage_per_month: of the checkpoints that are kept at the end.
    """

    gpu_per_day: float | None
    waste_per_day: float | None
    run: float | None
    run_waste: float | None
    storage_per_month: float | None


def upkeep_of(question: Question, outcome: Outcome) -> Upkeep | None:
    """Return the storage for the saves; None if the size of a checkpoint is unknown."""
    if question.nbytes is None:
        return None
    model = question.model
    period = float(outcome.interval + model.stall + outcome.waiting)
    saves = None if question.run is None else math.floor(question.run / period)
    # Without the length of the run the number of every-Nth checkpoints is unknown.
    kept = question.limits.keep_last
    if saves is not None:
        kept = storage.kept(saves, kept, question.keep_every, question.milestones)
    return Upkeep(
        period_s=period,
        bytes_per_day=question.nbytes * 86400 / period,
        write_bytes_per_s=question.nbytes / max(model.writing, 1e-9),
        saves=saves,
        kept=kept,
        kept_bytes=kept * question.nbytes,
    )


def money_of(question: Question, outcome: Outcome, upkeep: Upkeep | None) -> UpkeepCost | None:
    """Return the costs; None without a price."""
    if question.gpu_hour is None and question.tb_month is None:
        return None
    day = run = None
    if question.gpu_hour is not None and question.gpus is not None:
        day = float(storage.gpu_hours(question.gpus, 86400.0)) * question.gpu_hour
        if question.run is not None:
            run = day * question.run / 86400
    month = None
    if question.tb_month is not None and upkeep is not None:
        cost = storage.storage_cost(upkeep.kept_bytes, question.tb_month, storage.MONTH)
        month = float(cost)
    waste = float(outcome.waste)
    return UpkeepCost(
        gpu_per_day=day,
        waste_per_day=None if day is None else day * waste,
        run=run,
        run_waste=None if run is None else run * waste,
        storage_per_month=month,
    )
