"""Answer a plan's question: the interval, its outcome, its certainty, and improvements.

Compute a plan's storage and money. Prices are inputs in any currency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ftckpt.errors import UsageError
from ftckpt.planning.models.young_daly import Outcome

from .choose_model import Latent, Model, Plain, Silent, Tiered
from .models import arithmetic, storage, young_daly
from .models.arithmetic import peak
from .quantities import shown_duration
from .question import Constraint, IntervalRule, Question, Remedy, check


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


# Saves or flushes longer than this many mean times between failures are refused: the models still
# give an answer there, but a useless one.
_HOPELESS = 2.0
# Below this share of useful work there is nothing to plan.
_LEAST_GOODPUT = 1e-3


class Interval(NamedTuple):
    """Seconds of useful work between two saves.

    Attributes:
        exact_s: with the largest goodput.
        low_s: the same at the upper limit of the failure rate; None without a count.
        high_s: the same at the lower limit.
        young_s: by Young's rule.
        daly_s: by Daly's.
        chosen_s: the advised one.
        steps: the advised one in training steps.
        rounding_cost: goodput lost by rounding to whole steps.
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
    """A rule's interval, and its real outcome.

    Attributes:
        interval_s: the rule's interval.
        predicted: the goodput that the rule predicts.
        exact: the exact goodput there.
    """

    rule: str
    interval_s: float
    predicted: float
    exact: float


class Improvement(NamedTuple):
    """The effect of one change.

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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer.

    Attributes:
        outcome: where the wall time goes at the advised interval.
        goodput_limits: goodput at the confidence limits of the failure rate, the lower first; None
            without a count.
        forecasts: the rules' predictions.
        predicted: the goodput that the chosen rule predicts for the advised interval.
        improvements: the largest gain first.
        upkeep: of the storage; None without the size of a checkpoint.
        money: None without a price.
    """

    question: Question
    interval: Interval
    outcome: Outcome
    goodput_limits: tuple[float, float] | None
    forecasts: tuple[Forecast, ...]
    predicted: float
    constraints: tuple[Constraint, ...]
    improvements: tuple[Improvement, ...]
    upkeep: Upkeep | None
    money: UpkeepCost | None


def answer(question: Question) -> Plan:
    """Answer a question.

    Raises:
        UsageError: the job cannot make progress, or a number is out of range.
    """
    model = question.model
    best = float(solve(model).interval)
    forecasts = _forecasts(question, best)
    interval = _interval(question, best, {f.rule: f.interval_s for f in forecasts})
    outcome = question.outcome(interval.chosen_s)
    limits = None
    if question.failures.confidence is not None:
        jobs = (_scaled(question, mtbf) for mtbf in question.failures.mtbf_limits)
        low, high = (float(question.outcome(interval.chosen_s, job).useful) for job in jobs)
        limits = low, high
    upkeep = upkeep_of(question, outcome)
    return Plan(
        question=question,
        interval=interval,
        outcome=outcome,
        goodput_limits=limits,
        forecasts=forecasts,
        predicted=_predicted(question, question.rule, interval.chosen_s),
        constraints=tuple(check(model, outcome, question.limits, question.nbytes)),
        improvements=tuple(_improvements(question, forecasts[0], outcome)),
        upkeep=upkeep,
        money=money_of(question, outcome, upkeep),
    )


def solve(model: Model) -> Outcome:
    """Return the interval with the largest goodput, and its outcome.

    Raises:
        UsageError: the job cannot make progress, or its saves cost nothing.
    """
    _refuse_hopeless(model)
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


def _refuse_hopeless(model: Model) -> None:
    """Refuse a job that fails faster than it can save or restart; name what takes too long."""
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


def _forecasts(question: Question, best: float) -> tuple[Forecast, ...]:
    """Return the predictions of the rules that apply to this kind of save."""
    model = question.model
    save, mtbf = model.stall, model.rollback_mtbf
    intervals = {IntervalRule.EXACT: best}
    # The rules know one kind of save, with a cost above 0.
    if not isinstance(model, Tiered) and save > 0:
        young = max(float(young_daly.young(save, mtbf)), model.least_interval)
        daly = max(float(young_daly.daly(save, mtbf)), model.least_interval)
        intervals |= {IntervalRule.YOUNG: young, IntervalRule.DALY: daly, IntervalRule.ETTR: young}
    return tuple(
        Forecast(
            rule,
            interval,
            _predicted(question, rule, interval),
            float(question.outcome(interval).useful),
        )
        for rule, interval in intervals.items()
    )


def _predicted(question: Question, rule: IntervalRule, interval: float) -> float:
    """Return the goodput that a rule predicts for an interval; Daly's has no prediction."""
    model = question.model
    save, mtbf, restart, detect = model.stall, model.rollback_mtbf, model.reload, model.detect
    if rule is IntervalRule.YOUNG:
        first = young_daly.first_order(interval, save, mtbf, restart=restart, detect=detect)
        return float(first.useful)
    if rule is IntervalRule.ETTR:
        return float(young_daly.ettr(interval, save, mtbf, restart=restart + detect).useful)
    return float(question.outcome(interval).useful)


def _interval(question: Question, best: float, by_rule: dict[str, float]) -> Interval:
    """Choose the user's interval, else the rule's, within the limits, in whole steps."""
    model, step = question.model, question.step
    if question.rule not in by_rule:
        raise UsageError(
            f"--model {question.rule} knows one kind of save, and this job has another",
            hint="--model exact fits every job",
        )
    steps, cost = None, 0.0
    if question.interval is not None:
        chosen = question.interval
        steps = None if step is None else max(1, round(chosen / step))
    else:
        low, high = question.limits.window(model)
        # If both cannot hold, the requested loss wins; the constraint reports the other.
        chosen = min(max(by_rule[question.rule], low), high)
        if step is not None:
            steps = _whole_steps(model, chosen, step, low, high)
            cost = _goodput(model, chosen) - _goodput(model, steps * step)
            chosen = steps * step
    shortest = longest = None
    if question.failures.confidence is not None:
        shortest, longest = (_scaled(question, m).optimum() for m in question.failures.mtbf_limits)
    return Interval(
        exact_s=best,
        low_s=shortest,
        high_s=longest,
        young_s=float(young_daly.young(model.stall, model.rollback_mtbf)),
        daly_s=float(young_daly.daly(model.stall, model.rollback_mtbf)),
        chosen_s=chosen,
        steps=steps,
        rounding_cost=cost,
    )


def _whole_steps(model: Model, interval: float, step: float, low: float, high: float) -> int:
    """Round to a memorable number of steps, or just to a whole one within the bounds."""
    rounded = arithmetic.to_steps(
        interval, step, lambda tried: model.outcome(tried).useful, model.least_interval
    )
    if low <= rounded.interval <= high:
        return rounded.steps
    # A rounding error must not cost a step.
    least, most = math.ceil(low / step - 1e-9), high / step + 1e-9
    return max(1, least if least <= most else math.floor(most))


def _goodput(model: Model, interval: float) -> float:
    return float(model.outcome(interval).useful)


def _scaled(question: Question, mtbf: float) -> Model:
    return question.model.scaled_mtbf(mtbf / question.failures.mtbf)


def _improvements(question: Question, best: Forecast, outcome: Outcome) -> list[Improvement]:
    """Return the gain of each improvement, and of the best interval itself."""
    model = question.model
    now = float(outcome.useful)
    at, most = best.interval_s, best.exact
    if question.pauses:  # a period with pauses in it is best longer
        factor = 2 * (1 + question.pauses / at)
        at = float(peak(lambda tried: question.outcome(float(tried)).useful, at, factor))
        most = float(question.outcome(at).useful)
    found = [Improvement("the best interval", at, most, most - now)]
    if question.pauses:
        change = "no weights-only saves"
        without = _goodput(model, best.interval_s)
        found.append(Improvement(change, best.interval_s, without, without - now))
    remedied = [(one.change, _remedied(model, one)) for one in question.remedies]
    for change, better in (*model.improvements(), *remedied):
        interval = better.optimum()
        goodput = float(question.outcome(interval, better).useful)
        found.append(Improvement(change, interval, goodput, goodput - best.exact))
    return sorted(found, key=lambda improvement: -improvement.gain)


def _remedied(model: Model, remedy: Remedy) -> Model:
    better = model.scaled_mtbf(remedy.mtbf)
    if remedy.sooner and isinstance(better, Latent | Plain | Silent):
        return replace(better, restart=max(0.0, better.restart - remedy.sooner))
    return better


def around(interval: float, least: float, factors: Sequence[float]) -> list[float]:
    """Return distinct intervals around one, ascending, none below `least`."""
    return sorted({max(interval * factor, least) for factor in factors})
