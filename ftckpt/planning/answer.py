"""The answer of a plan: the interval, what it leads to, how sure it is, what to improve first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from ftckpt.errors import UsageError
from ftckpt.interval import classic, rounding, storage
from ftckpt.interval.outcome import Outcome
from ftckpt.quantities import shown_duration

from .bounds import Constraint, Limits, check
from .failures import Failures
from .models import Model, Tiered

# A save or flush of this many mean times between failures is refused: the models have an answer
# there too, and it helps nobody.
_HOPELESS = 2.0
# So little useful work is no plan.
_LEAST_GOODPUT = 1e-3


class Rule(StrEnum):
    """Whose interval is taken, and whose prediction is shown."""

    EXACT = "exact"
    YOUNG = "young"
    DALY = "daly"
    ETTR = "ettr"


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is planned. Times in seconds, sizes in bytes; None for what is not known.

    Attributes:
        model: the job.
        failures: what stops it, with its error bars.
        rule: whose interval is taken.
        interval: work between two saves, where the user decides it.
        step: of training.
        limits: what must hold.
        nbytes: of a checkpoint.
        gpus: of the job.
        run: length of the run on the wall clock.
        keep_every: every how manieth checkpoint is kept for good; 0 for none.
        gpu_hour: price of one.
        tb_month: price of 10^12 bytes for a month.
    """

    model: Model
    failures: Failures
    rule: Rule = Rule.EXACT
    interval: float | None = None
    step: float | None = None
    limits: Limits = field(default_factory=Limits)
    nbytes: float | None = None
    gpus: int | None = None
    run: float | None = None
    keep_every: int = 0
    gpu_hour: float | None = None
    tb_month: float | None = None


class Interval(NamedTuple):
    """Seconds of useful work between two saves.

    Attributes:
        exact_s: with the largest goodput.
        low_s: the same at the most failures that the count allows; None where nothing was counted.
        high_s: at the fewest.
        young_s: by Young's rule.
        daly_s: by Daly's.
        chosen_s: that is advised.
        steps: the same in training steps.
        rounding_cost: goodput that is given up for a round number of steps.
    """

    exact_s: float
    low_s: float | None
    high_s: float | None
    young_s: float
    daly_s: float
    chosen_s: float
    steps: int | None
    rounding_cost: float


class Forecast(NamedTuple):
    """What one rule says, and what its interval really leads to.

    Attributes:
        rule: whose.
        interval_s: its interval.
        predicted: the goodput that it predicts.
        exact: the exact goodput there.
    """

    rule: str
    interval_s: float
    predicted: float
    exact: float


class Improvement(NamedTuple):
    """What one change would bring.

    Attributes:
        change: in words.
        interval_s: the best interval then.
        goodput: then.
        gain: in goodput, as a fraction.
    """

    change: str
    interval_s: float
    goodput: float
    gain: float


class Upkeep(NamedTuple):
    """What saving takes of the storage.

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


class Money(NamedTuple):
    """What it costs, in the currency of the prices; None for what has no price or no length.

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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer.

    Attributes:
        question: what was asked.
        interval: how often to save.
        outcome: where the wall time goes then.
        goodput_limits: goodput at the confidence limits of the failure rate, the lower first; None
            where nothing was counted.
        forecasts: what the rules say.
        constraints: what holds and what does not.
        improvements: the largest gain first.
        upkeep: of the storage; None without the size of a checkpoint.
        money: None without a price.
    """

    question: Question
    interval: Interval
    outcome: Outcome
    goodput_limits: tuple[float, float] | None
    forecasts: tuple[Forecast, ...]
    constraints: tuple[Constraint, ...]
    improvements: tuple[Improvement, ...]
    upkeep: Upkeep | None
    money: Money | None


def answer(question: Question) -> Plan:
    """Plan.

    Raises:
        UsageError: the job cannot make progress, or a number is out of range; a sentence says why.
    """
    model = question.model
    best = float(solve(model).interval)
    forecasts = _forecasts(model, best)
    interval = _interval(question, best, {f.rule: f.interval_s for f in forecasts})
    outcome = model.outcome(interval.chosen_s)
    limits = None
    if question.failures.confidence is not None:
        low, high = (_scaled(question, mtbf) for mtbf in question.failures.mtbf_limits)
        limits = _goodput(low, interval.chosen_s), _goodput(high, interval.chosen_s)
    upkeep = _upkeep(question, outcome)
    return Plan(
        question=question,
        interval=interval,
        outcome=outcome,
        goodput_limits=limits,
        forecasts=forecasts,
        constraints=tuple(check(model, outcome, question.limits, question.nbytes)),
        improvements=tuple(_improvements(model, outcome)),
        upkeep=upkeep,
        money=_money(question, outcome, upkeep),
    )


def solve(model: Model) -> Outcome:
    """Return the interval with the largest goodput, and where the wall time goes with it.

    Raises:
        UsageError: the job cannot make progress, or its saves cost nothing; a sentence says why.
    """
    refuse_hopeless(model)
    best = model.optimum()
    if not best > 0:
        raise UsageError(
            "a save that costs nothing is made after every step, and there is nothing to plan",
            hint="say what a save costs: --save 60s, or --snapshot 2s --flush 60s",
        )
    outcome = model.outcome(best)
    if not float(outcome.useful) > _LEAST_GOODPUT:
        raise UsageError(
            "less than 0.1 % of the wall time would be useful work: no interval helps this job",
            hint="it must fail less often, or save and restart faster",
        )
    return outcome


def refuse_hopeless(model: Model) -> None:
    """Refuse a job that fails faster than it can save or restart.

    Raises:
        UsageError: says what takes too long.
    """
    limit = _HOPELESS * model.rollback_mtbf
    for name, seconds in (
        ("a save stops training for", model.stall),
        ("a copy becomes durable only after", model.durable),
        ("a restart takes", model.reload),
    ):
        if not seconds < limit:
            raise UsageError(
                f"{name} {shown_duration(seconds)} and the job fails every "
                f"{shown_duration(model.rollback_mtbf)}: hardly any work would ever be kept",
                hint="no interval helps; save to faster storage or in the background, use fewer "
                "GPUs, or check the units",
            )


def _forecasts(model: Model, best: float) -> tuple[Forecast, ...]:
    save, mtbf = model.stall, model.rollback_mtbf
    restart, detect = model.reload, model.detect

    exact = partial(_goodput, model)
    found = [Forecast(Rule.EXACT, best, exact(best), exact(best))]
    if isinstance(model, Tiered) or not save > 0:
        return tuple(found)  # they know one kind of save, and one that costs something
    young = max(float(classic.young(save, mtbf)), model.least_interval)
    daly = max(float(classic.daly(save, mtbf)), model.least_interval)
    first = classic.first_order(young, save, mtbf, restart=restart, detect=detect)
    ettr = classic.ettr(young, save, mtbf, restart=restart + detect)
    found.append(Forecast(Rule.YOUNG, young, float(first.useful), exact(young)))
    found.append(Forecast(Rule.DALY, daly, exact(daly), exact(daly)))
    found.append(Forecast(Rule.ETTR, young, float(ettr.useful), exact(young)))
    return tuple(found)


def _interval(question: Question, best: float, by_rule: dict[str, float]) -> Interval:
    """Choose: what the user says, else the rule's interval, within the limits, in whole steps."""
    model = question.model
    if question.rule not in by_rule:
        raise UsageError(
            f"--model {question.rule} knows one kind of save, and this job has another",
            hint="--model exact fits every job",
        )
    low, high = question.limits.window(model)
    chosen, steps, cost = by_rule[question.rule], None, 0.0
    # Where both cannot hold, the loss that was asked for wins, and the constraint says what breaks.
    chosen = min(max(chosen, low), high) if high > 0 else chosen
    if question.interval is not None:
        chosen = question.interval
    elif question.step is not None:
        rounded = rounding.to_steps(
            chosen, question.step, lambda t: model.outcome(t).useful, model.least_interval
        )
        steps = rounded.steps
        if not low <= rounded.interval <= high:
            # What is round may lie outside by less than its grain; whole steps must do.
            steps = max(1, math.ceil(low / question.step - 1e-9))
            if steps * question.step > high or chosen > low:
                steps = max(1, math.floor(high / question.step + 1e-9))
        wanted, chosen = chosen, steps * question.step
        cost = _goodput(model, wanted) - _goodput(model, chosen)
    if question.step is not None and steps is None:
        steps = max(1, round(chosen / question.step))
    bounds: tuple[float | None, float | None] = (None, None)
    if question.failures.confidence is not None:
        shortest, longest = question.failures.mtbf_limits
        bounds = (_optimum_at(question, shortest), _optimum_at(question, longest))
    return Interval(
        exact_s=best,
        low_s=bounds[0],
        high_s=bounds[1],
        young_s=float(classic.young(model.stall, model.rollback_mtbf)),
        daly_s=float(classic.daly(model.stall, model.rollback_mtbf)),
        chosen_s=chosen,
        steps=steps,
        rounding_cost=cost,
    )


def _goodput(model: Model, interval: float) -> float:
    return float(model.outcome(interval).useful)


def _scaled(question: Question, mtbf: float) -> Model:
    return question.model.scaled_mtbf(mtbf / question.failures.mtbf)


def _optimum_at(question: Question, mtbf: float) -> float:
    return _scaled(question, mtbf).optimum()


def _improvements(model: Model, outcome: Outcome) -> list[Improvement]:
    found = []
    for change, better in model.improvements():
        interval = better.optimum()
        goodput = _goodput(better, interval)
        found.append(Improvement(change, interval, goodput, goodput - float(outcome.useful)))
    return sorted(found, key=lambda improvement: -improvement.gain)


def _upkeep(question: Question, outcome: Outcome) -> Upkeep | None:
    if question.nbytes is None:
        return None
    model = question.model
    period = float(outcome.interval + model.stall + outcome.waiting)
    saves = None if question.run is None else math.floor(question.run / period)
    kept = question.limits.keep_last
    if saves is not None:
        kept = storage.kept(saves, kept, question.keep_every)
    return Upkeep(
        period_s=period,
        bytes_per_day=question.nbytes * 86400 / period,
        write_bytes_per_s=question.nbytes / max(model.durable, 1e-9),
        saves=saves,
        kept=kept,
        kept_bytes=kept * question.nbytes,
    )


def _money(question: Question, outcome: Outcome, upkeep: Upkeep | None) -> Money | None:
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
    return Money(
        gpu_per_day=day,
        waste_per_day=None if day is None else day * waste,
        run=run,
        run_waste=None if run is None else run * waste,
        storage_per_month=month,
    )


def around(interval: float, least: float, factors: Sequence[float]) -> list[float]:
    """Return intervals around one, ascending, none below `least`, each once."""
    return sorted({max(interval * factor, least) for factor in factors})
