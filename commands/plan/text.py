"""The answer of `plan` as text: first the answer, then why, how sure, what it costs, what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ftckpt.amounts import brief_duration, decimal_bytes
from ftckpt.commands.cli.render import block, pairs, table
from ftckpt.planning import Model, Plan, Silent, Tiered
from ftckpt.planning.models.young_daly import Outcome
from ftckpt.planning.question import Constraint

if TYPE_CHECKING:
    from ftckpt.operations.planning.failures import Notes


# In the order in which a reader meets them, and the letter that draws each in the terminal's plot.
SHARES = {
    "save": ("saving", "s"),
    "lost": ("lost work", "L"),
    "detection": ("detection", "d"),
    "restart": ("restart", "r"),
    "waiting": ("waiting for a flush", "w"),
}

# Less is not seen in two digits of percentage points.
_NOTHING = 5e-5

_BAR = 44  # columns of the longest bar


def percent(share: float, digits: int = 2) -> str:
    """Return a fraction in percent."""
    return f"{100 * share:.{digits}f} %"


def points(share: float) -> str:
    """Return a difference of fractions in percentage points, with its sign."""
    return f"{100 * share:+.2f} pp"


def headline(plan: Plan) -> str:
    """Return the answer in one sentence."""
    chosen = plan.interval
    model = plan.question.model
    where = further = ""
    if isinstance(model, Tiered):
        (first, *others), gap = model.pattern.tiers, model.pattern.gap
        where = f" to {first.name}"
        scale = chosen.chosen_s / float(model.pattern.interval)
        further = "".join(
            f", to {tier.name} after every {brief_duration(scale * float(gap(place)))}"
            for place, tier in enumerate(others, 1)
        )
    steps = ""
    if chosen.steps is not None:
        steps = "step = " if chosen.steps == 1 else f"{chosen.steps:,} steps = "
    return (
        f"save{where} after every {steps}{brief_duration(chosen.chosen_s)} of work{further}: "
        f"{percent(float(plan.outcome.useful))} of the wall time is useful{_but(model)}"
    )


def _but(model: Model) -> str:
    """Return the costs that were taken as zero, which make the answer better than the truth."""
    parts = [("detection", model.detect), ("restart", model.reload)]
    if isinstance(model, Silent):
        parts.append(("verification", model.verify))
    free = [word for word, seconds in parts if not seconds]
    words = " and ".join([", ".join(free[:-1]), free[-1]] if free[1:] else free)
    return f" (with {words} taken as free)" if free else ""


def text_of(plan: Plan, notes: Notes, currency: str) -> Iterator[str]:
    """Yield the parts of the answer; the caller puts an empty line between them."""
    yield headline(plan)
    yield pairs(list(_confidence(plan)))
    yield block("where the wall time goes", pairs(list(_split(plan.outcome))))
    if isinstance(plan.question.model, Tiered):
        yield _tiers(plan.question.model)
    yield block("why", *(f"- {reason}" for reason in _reasons(plan, notes)))
    yield block("the rules beside each other", _rules(plan))
    yield block("what to improve first", _improvements(plan, currency))
    if plan.constraints:
        yield block("what must hold", _constraints(plan.constraints))
    if plan.upkeep is not None or plan.money is not None:
        yield block("what it costs", pairs(list(_costs(plan, currency))))


def _confidence(plan: Plan) -> Iterator[tuple[str, object]]:
    interval, failures = plan.interval, plan.question.failures
    yield "best interval", brief_duration(interval.exact_s)
    if interval.low_s is not None and interval.high_s is not None:
        confidence = f"{100 * (failures.confidence or 0):g} %"
        low, high = failures.mtbf_limits
        spread = f"{brief_duration(interval.low_s)} to {brief_duration(interval.high_s)}"
        yield (
            f"  at {confidence} limits",
            f"{spread}, as a failure comes every {brief_duration(low)} to {brief_duration(high)}",
        )
        if failures.dispersion == 1:
            yield (
                "  which hold",
                "for independent failures (Poisson); where failures come in clusters, limits of "
                "95 % have held in 70 to 89 % of trials",
            )
    if plan.goodput_limits is not None:
        worst, best = plan.goodput_limits
        yield "  goodput there", f"{percent(worst)} to {percent(best)} with the interval advised"
    if abs(interval.rounding_cost) > _NOTHING:
        yield "rounding", f"{points(-interval.rounding_cost)} for a round number of steps"
    yield "model", plan.outcome.model


def _split(outcome: Outcome) -> Iterator[tuple[str, object]]:
    yield "  useful work", percent(float(outcome.useful)).rjust(8)
    for name, (words, _) in SHARES.items():
        share = float(getattr(outcome, name))
        if share > 0:
            yield f"  {words}", percent(share).rjust(8)


def _tiers(model: Tiered) -> str:
    gaps = {tier.name: model.pattern.gap(place) for place, tier in enumerate(model.pattern.tiers)}
    rows = []
    for tier in model.tiers:
        used = tier.name in gaps
        every = brief_duration(float(gaps[tier.name])) if used else "not worth it"
        cost, restore = brief_duration(tier.cost), brief_duration(tier.restart)
        rows.append([tier.name, every, cost, restore, percent(tier.covers, 1)])
    head = ["tier", "work between saves>", "save>", "restore>", "survives>"]
    return block("which save goes where, at best", table(head, rows))


def _reasons(plan: Plan, notes: Notes) -> Iterator[str]:
    question = plan.question
    causes = question.failures.rates.share
    parts = ", ".join(f"{name} {percent(share, 1)}" for name, share in causes.items())
    by = f": {parts}" if len(causes) > 1 else f" ({next(iter(causes))})"
    yield f"the job fails every {brief_duration(question.failures.mtbf)} on average{by}"
    yield from _saving(question.model)
    if question.pauses:
        stops = brief_duration(question.pauses)
        yield f"the weights-only saves between two full ones stop it for {stops} together"
    yield from _failing(question.model)
    yield from notes.remarks
    if notes.measured.interval is not None:
        now = notes.measured.interval
        goodput = float(question.outcome(now).useful)
        gain = float(plan.outcome.useful) - goodput
        yield (
            f"now it saves after every {brief_duration(now)} of work: {percent(goodput)} useful, "
            f"{points(gain)} with the interval advised"
        )
    exact = plan.interval.exact_s
    twice = [float(question.outcome(f * exact).useful) for f in (0.5, 2.0)]
    best = float(question.outcome(exact).useful)
    yield (
        f"the optimum is flat: half of it gives {points(twice[0] - best)}, "
        f"twice of it {points(twice[1] - best)}"
    )


def _saving(model: Model) -> Iterator[str]:
    flush = model.durable - model.stall
    if isinstance(model, Tiered):
        return
    if flush > 0:
        yield (
            f"a save delays training by {brief_duration(model.stall)} and is durable after "
            f"{brief_duration(model.durable)}"
        )
        if model.optimum() <= model.least_interval * (1 + 1e-9):
            yield "the flush sets the pace, not the failures: saves come as often as it allows"
    else:
        yield f"a save stops training for {brief_duration(model.stall)}"


def _failing(model: Model) -> Iterator[str]:
    """Yield what a failure costs beside the work, and what is taken to be free."""
    most = "up to " if isinstance(model, Tiered) else ""
    costs, free = [], []
    for flag, seconds, words in (
        ("--detect", model.detect, f"{brief_duration(model.detect)} to notice and replace"),
        ("--restart", model.reload, f"{most}{brief_duration(model.reload)} to restart"),
    ):
        if seconds:
            costs.append(words)
        else:
            free.append(flag)
    if isinstance(model, Silent) and not model.verify:
        free.append("--set verify-cost (a check before each save that finds every silent error)")
    if costs:
        yield f"a failure costs {', '.join(costs)}"
    if free:
        yield f"taken to cost nothing, because not given: {', '.join(free)}"


def _rules(plan: Plan) -> str:
    rows = [
        [f.rule, brief_duration(f.interval_s), percent(f.predicted), percent(f.exact)]
        for f in plan.forecasts
    ]
    return table(["rule", "interval>", "goodput it predicts>", "exact goodput there>"], rows)


def _improvements(plan: Plan, currency: str) -> str:
    money = plan.money
    day = None if money is None else money.gpu_per_day
    rows = []
    for better in plan.improvements:
        if better.gain < _NOTHING:
            continue
        row = [better.change, points(better.gain), percent(better.goodput),
               brief_duration(better.interval_s)]  # fmt: skip
        rows.append(row if day is None else [*row, f"{better.gain * day:,.0f} {currency}"])
    head = ["change", "gain>", "goodput>", "best interval>"]
    return table(head if day is None else [*head, "worth a day>"], rows)


def _constraints(constraints: tuple[Constraint, ...]) -> str:
    rows = [
        ["ok" if c.ok else "FAILS", c.name, amount(c.value, c.unit), amount(c.limit, c.unit),
         c.advice]
        for c in constraints
    ]  # fmt: skip
    return table(["", "constraint", "is>", "limit>", ""], rows)


def amount(value: float, unit: str) -> str:
    """Return a value of a constraint with its unit."""
    if unit == "s":
        return brief_duration(value)
    if unit in ("B", "B/s"):
        return decimal_bytes(value) + unit[1:]
    return percent(value) if value < 1 else f"{value:g}"


def _costs(plan: Plan, currency: str) -> Iterator[tuple[str, object]]:
    upkeep, money = plan.upkeep, plan.money
    if upkeep is not None:
        yield "  written", f"{decimal_bytes(upkeep.bytes_per_day)} a day"
        speed = decimal_bytes(upkeep.write_bytes_per_s)
        yield "  bandwidth", f"{speed}/s while a save is being written"
        saves = "" if upkeep.saves is None else f" of {upkeep.saves:,} saves"
        size = decimal_bytes(upkeep.kept_bytes)
        yield "  kept", f"{upkeep.kept:,} checkpoints{saves}, {size}"
    if money is None:
        return
    for name, value in (
        ("GPUs", _priced(money.gpu_per_day, money.run, currency)),
        ("of it wasted", _priced(money.waste_per_day, money.run_waste, currency)),
    ):
        if value:
            yield f"  {name}", value
    if money.storage_per_month is not None:
        yield "  storage", f"{money.storage_per_month:,.0f} {currency} a month"


def _priced(day: float | None, run: float | None, currency: str) -> str:
    if day is None:
        return ""
    return f"{day:,.0f} {currency} a day" + ("" if run is None else f", {run:,.0f} in the run")


def shares_of(outcome: Outcome) -> dict[str, float]:
    """Return what is not useful, by the keys of `SHARES`."""
    return {name: float(getattr(outcome, name)) for name in SHARES}


def terminal_plot(rows: list[tuple[float, Mapping[str, float]]], best: float) -> str:
    """Return bars of waste against the interval, a letter for each share.

    Args:
        rows: (interval, shares by the keys of `SHARES`), ascending.
        best: the interval to mark.
    """
    most = max(sum(shares.values()) for _, shares in rows)
    used = [n for n in SHARES if any(shares.get(n, 0) > 0.5 / _BAR * most for _, shares in rows)]
    lines = [
        "waste against the interval: " + ", ".join(f"{SHARES[n][1]} {SHARES[n][0]}" for n in used)
    ]
    for interval, shares in rows:
        # Ends of the segments are rounded, not their lengths, so that a bar is as long as its sum.
        bar, end = "", 0.0
        for name in used:
            end += shares.get(name, 0.0)
            bar += SHARES[name][1] * (round(_BAR * end / most) - len(bar))
        mark = ">" if interval == best else " "
        name = brief_duration(interval).rjust(12)
        lines.append(f"{mark}{name} {percent(sum(shares.values())).rjust(8)} |{bar}")
    return block(*lines)
