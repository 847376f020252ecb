"""Waste against the interval of one plan: for the terminal, and for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.render import brief_duration
from ftckpt.planning import IntervalRule, Model, Plan, Tiered, around, solve

from .text import SHARES, shares_of, terminal_plot

if TYPE_CHECKING:
    from ftckpt.planning.simulation import Simulated

# Intervals that the terminal's plot shows, as multiples of the best.
_MULTIPLES = (0.125, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 8.0)


def in_terminal(plan: Plan) -> str:
    """Return bars of waste against the interval."""
    best, model = plan.interval.exact_s, plan.question.model
    intervals = around(best, model.least_interval, _MULTIPLES)
    return terminal_plot([(one, shares_of(model.outcome(one))) for one in intervals], best)


def draw(plan: Plan, path: str, simulated: Sequence[Simulated]) -> str:
    """Draw waste against the interval, with what was simulated; return the path of its numbers."""
    from .pictures import WasteCurve, waste_picture

    best, model = plan.interval.exact_s, plan.question.model
    # A factor of eight to both sides shows both walls of the valley.
    grid = around(best, model.least_interval, [8 ** (k / 60) for k in range(-60, 61)])
    grid = sorted({*grid, *(float(s.outcome.interval) for s in simulated)})
    splits = [shares_of(model.outcome(interval)) for interval in grid]
    others = {f.rule.title(): f.interval_s for f in plan.forecasts if f.rule == IntervalRule.YOUNG}
    if not 0.9 < plan.interval.chosen_s / best < 1.1:
        others["chosen"] = plan.interval.chosen_s
    curve = WasteCurve(
        title=_title(plan),
        intervals=grid,
        shares={name: [split[name] for split in splits] for name in SHARES},
        optimum=(best, float(model.outcome(best).waste)),
        others=others,
        **_of_tiers(model),
        points=[(float(s.outcome.interval), 1 - s.mean, s.error) for s in simulated],
    )
    return waste_picture(curve, path)


def _of_tiers(model: Model) -> dict[str, Any]:
    """Return what a picture of tiers says besides: the x axis, and the last tier on its own."""
    if not isinstance(model, Tiered):
        return {}
    first, last = model.pattern.tiers[0], model.tiers[-1]
    alone = solve(replace(model, tiers=(last,)))
    return {
        "label": f"useful work between two saves to {first.name}",
        "levels": {f"saving to {last.name} alone, at best": float(alone.waste)},
    }


def _title(plan: Plan) -> str:
    question, model = plan.question, plan.question.model
    parts = [] if question.gpus is None else [f"{question.gpus:,} GPUs"]
    parts.append(f"a failure every {brief_duration(model.rollback_mtbf)}")
    if isinstance(model, Tiered):
        parts.append(f"saved to {' and '.join(tier.name for tier in model.pattern.tiers)}")
    elif model.durable > model.stall:
        parts.append(f"durable after {brief_duration(model.durable)}")
    else:
        parts.append(f"saves of {brief_duration(model.stall)}")
    title = ", ".join(parts)
    return title[0].upper() + title[1:]
