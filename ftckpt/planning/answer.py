"""The answer of a plan: the interval, what it leads to, how sure it is, what to improve first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ftckpt.errors import UsageError
from ftckpt.planning.models.outcome import Outcome

from .bounds import Constraint, check
from .choose_model import Model, Tiered
from .models import classic, rounding
from .quantities import shown_duration
from .question import IntervalRule, Question
from .upkeep import Upkeep, UpkeepCost, money_of, upkeep_of

# A save or flush of this many mean times between failures is refused: the models have an answer
# there too, and it helps nobody.
_HOPELESS = 2.0
# Below this share of useful work no plan is given.
_LEAST_GOODPUT = 1e-3


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
        predicted: the goodput that the rule asked for predicts for the interval that is advised.
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
    predicted: float
    constraints: tuple[Constraint, ...]
    improvements: tuple[Improvement, ...]
    upkeep: Upkeep | None
    money: UpkeepCost | None


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
    upkeep = upkeep_of(question, outcome)
    return Plan(
        question=question,
        interval=interval,
        outcome=outcome,
        goodput_limits=limits,
        forecasts=forecasts,
        predicted=_predicted(model, question.rule, interval.chosen_s),
        constraints=tuple(check(model, outcome, question.limits, question.nbytes)),
        improvements=tuple(_improvements(model, forecasts[0], outcome)),
        upkeep=upkeep,
        money=money_of(question, outcome, upkeep),
    )


def solve(model: Model) -> Outcome:
    """Return the interval with the largest goodput, and where the wall time goes with it.

    Raises:
        UsageError: the job cannot make progress, or its saves cost nothing; a sentence says why.
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
    """Refuse a job that fails faster than it can save or restart, and say what takes too long."""
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
    """Return what each rule says that knows this kind of save."""
    save, mtbf = model.stall, model.rollback_mtbf
    intervals = {IntervalRule.EXACT: best}
    # The rules know one kind of save, and one that costs something.
    if not isinstance(model, Tiered) and save > 0:
        young = max(float(classic.young(save, mtbf)), model.least_interval)
        daly = max(float(classic.daly(save, mtbf)), model.least_interval)
        intervals |= {IntervalRule.YOUNG: young, IntervalRule.DALY: daly, IntervalRule.ETTR: young}
    return tuple(
        Forecast(rule, interval, _predicted(model, rule, interval), _goodput(model, interval))
        for rule, interval in intervals.items()
    )


def _predicted(model: Model, rule: IntervalRule, interval: float) -> float:
    """Return the goodput that a rule predicts for an interval; Daly's predicts none of its own."""
    save, mtbf, restart, detect = model.stall, model.rollback_mtbf, model.reload, model.detect
    if rule is IntervalRule.YOUNG:
        first = classic.first_order(interval, save, mtbf, restart=restart, detect=detect)
        return float(first.useful)
    if rule is IntervalRule.ETTR:
        return float(classic.ettr(interval, save, mtbf, restart=restart + detect).useful)
    return _goodput(model, interval)


def _interval(question: Question, best: float, by_rule: dict[str, float]) -> Interval:
    """Choose: what the user says, else the rule's interval, within the limits, in whole steps."""
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
        # Where both cannot hold, the loss that was asked for wins; the constraint says what breaks.
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
        young_s=float(classic.young(model.stall, model.rollback_mtbf)),
        daly_s=float(classic.daly(model.stall, model.rollback_mtbf)),
        chosen_s=chosen,
        steps=steps,
        rounding_cost=cost,
    )


def _whole_steps(model: Model, interval: float, step: float, low: float, high: float) -> int:
    """Round to a number of steps that is easy to remember, or just to whole ones within bounds."""
    rounded = rounding.to_steps(
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


def _improvements(model: Model, best: Forecast, outcome: Outcome) -> list[Improvement]:
    """Return the gain of each improvement over the best interval, and of that interval itself."""
    gain = best.exact - float(outcome.useful)
    found = [Improvement("the best interval", best.interval_s, best.exact, gain)]
    for change, better in model.improvements():
        interval = better.optimum()
        goodput = _goodput(better, interval)
        found.append(Improvement(change, interval, goodput, goodput - best.exact))
    return sorted(found, key=lambda improvement: -improvement.gain)


def around(interval: float, least: float, factors: Sequence[float]) -> list[float]:
    """Return intervals around one, ascending, none below `least`, each once."""
    return sorted({max(interval * factor, least) for factor in factors})
