"""What weights-only saves between two full ones are worth."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ftckpt.amounts import brief_duration
from ftckpt.commands.cli.render import block
from ftckpt.errors import UsageError
from ftckpt.findings import counted
from ftckpt.planning import Model, Plan, Tiered, quantities
from ftckpt.planning.models.weights_alone import WeightsOnly, weights_only
from ftckpt.planning.state_size import state_parts

from .options import CostOptions
from .text import points


def read_pause(costs: CostOptions, model: Model) -> float:
    """Return the seconds that one of them stops the training; 0 where none are made.

    Raises:
        UsageError: an option cannot be understood, contradicts another, or one is missing.
    """
    if not costs.weights_between:
        for flag, text in (("--weights-save", costs.weights_save), ("--rewarm", costs.rewarm)):
            if text:
                raise UsageError(f"{flag} needs --weights-between: how many are there?")
        return 0.0
    if isinstance(model, Tiered):
        raise UsageError("--tier and --weights-between are not planned for together")
    if costs.weights_save:
        return quantities.duration(costs.weights_save, "--weights-save")
    return model.stall * _share(costs)


def read_weights(costs: CostOptions, plan: Plan, pause: float) -> WeightsOnly | None:
    """Return what they are worth at the interval of a plan; None where none are made."""
    if not costs.weights_between:
        return None
    model = plan.question.model
    return weights_only(
        plan.interval.chosen_s,
        model.rollback_mtbf,
        costs.weights_between,
        pause,
        quantities.duration(costs.rewarm, "--rewarm") if costs.rewarm else None,
        model.outcome,
        full=model.stall,
    )


def _share(costs: CostOptions) -> float:
    """Return the weights' share of the bytes of a checkpoint."""
    recipe = costs.bytes_per_param
    if recipe.replace(".", "", 1).isdecimal():
        raise UsageError(
            "nothing says what a weights-only save costs",
            hint="--weights-save 8s, or --bytes-per-param bf16-adamw",
        )
    parts = state_parts(recipe)
    return parts[0][1] / sum(size for _, size in parts)


def weights_record(found: WeightsOnly) -> dict[str, Any]:
    """Return it as fields of the document."""
    return {**asdict(found), "worth": found.worth}


def weights_text(found: WeightsOnly) -> str:
    """Return it in words."""
    each = brief_duration(found.save_s)
    lines = [
        f"{counted(found.between, 'weights-only save')} of {each} between two full ones",
        f"- they cost {points(-found.cost)}, which the goodput above has in it",
    ]
    if found.rewarm_s is None:
        lines.append(
            "- no resume uses them: without the optimizer it is not exact (--rewarm says what an "
            "inexact one loses); they serve evaluation and serving"
        )
    else:
        loses = brief_duration(found.rewarm_s)
        lines.append(
            f"- an inexact resume from one loses {loses} besides: {points(found.gain)}, together "
            f"{points(found.worth)} (not in the goodput above)"
        )
        if not found.gain:
            most = brief_duration(found.most_rewarm_s)
            lines.append(f"- from {most} on, every failure goes back to the full save anyway")
    return block(*lines)
