"""`ftckpt plan`: how often to save, what it costs, and what to improve first?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block, terminal_width
from ftckpt.commands.pictures.drawing import check_path
from ftckpt.errors import ExitCode
from ftckpt.operations import planning
from ftckpt.operations.definition import option
from ftckpt.operations.planning.failures import FailureOptions

from .curve import draw, in_terminal
from .presets import show_presets
from .simulation import simulation_text
from .text import headline, text_of
from .weights import weights_text

if TYPE_CHECKING:
    from ftckpt.operations.planning import PlanReport

operation = planning.plan

# Intervals that a picture has simulated points at, as multiples of the advised one.
_BESIDE = (0.25, 0.5, 2.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class PlanPicture:
    """How the answer is drawn."""

    TITLE: ClassVar[str] = "Options"

    plot: Annotated[str, option("FILE", "Picture: .png, .svg, .html; - draws in the terminal.")] = (
        ""
    )


OPTIONS = (PlanPicture,)


def check(invocation: Invocation, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuse a picture that cannot be drawn, and ask for what it shows.

    Raises:
        UsageError, RefusedError: the file cannot be written, or stands there.
    """
    plot = invocation.options(PlanPicture).plot
    if plot in ("", "-"):
        return given
    if invocation.options(FailureOptions).preset != "list":
        check_path(plot)
    return {**given, "beside": _BESIDE}


def render(invocation: Invocation, report: PlanReport, _: Mapping[str, Any]) -> Result:
    """Print the answer, why, how sure it is, what it costs; and draw it."""
    if isinstance(report, planning.PresetList):
        return show_presets(invocation, report)
    plan, plot = report.plan, invocation.options(PlanPicture).plot
    parts = list(text_of(plan, report.notes, report.currency))
    if report.between is not None:
        parts.append(weights_text(report.between))
    if report.simulated:
        parts.append(simulation_text(report.simulated[0], float(plan.outcome.useful)))
    if plot == "-" or (not plot and terminal_width() is not None):
        parts.append(in_terminal(plan))
    invocation.print(block(*parts, between="\n\n"))
    if plot not in ("", "-"):
        numbers = draw(plan, plot, report.simulated)
        invocation.report(plot={"file": plot, "numbers": numbers})
        invocation.say(f"picture: {plot}; its numbers: {numbers}")
    broken = [constraint.name for constraint in plan.constraints if not constraint.ok]
    if broken:
        invocation.warn(f"warning: does not hold: {', '.join(broken)}")
    return Result(ExitCode.OK, headline(plan))
