"""What weights-only saves between two full ones are worth, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.amounts import brief_duration
from ftckpt.commands.cli.render import block
from ftckpt.findings import counted

from .text import points

if TYPE_CHECKING:
    from ftckpt.planning.models.weights_alone import WeightsOnly


def weights_text(found: WeightsOnly) -> str:
    """Return it in words."""
    each = brief_duration(found.save_s)
    lines = [
        f"{counted(found.between, 'weights-only save')} of {each} between two full ones",
        f"- they cost {points(-found.cost)}, which the goodput above has in it",
    ]
    if found.rewarm_s is None:
        lines.append(
            "- no resume uses them: without the optimizer it is not "
            "exact (--set rewarm says what an "
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
