"""`ftckpt diff`: what changed between two checkpoints?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ftckpt.commands.cli.invocation import Invocation, Relay, Result
from ftckpt.errors import ExitCode
from ftckpt.operations import comparing
from ftckpt.operations.definition import option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.comparison import DiffReport
    from ftckpt.observer import Observer

operation = comparing.diff


@dataclass(frozen=True, kw_only=True)
class DiffOptions:
    """What is shown."""

    TITLE: ClassVar[str] = "Options"

    top: Annotated[int, option("N", "Tensors shown, by relative change; 0: sums alone.", min=0)] = (
        20
    )
    plot: Annotated[str, option("FILE", "A heat map, layer by component: .png, .svg, .html.")] = ""


OPTIONS = (DiffOptions,)


class _Sides(Relay):
    """Prints what is compared before it is."""

    def report(self, **fields: Any) -> None:
        """Print both sides."""
        super().report(**fields)
        if "other" in fields:
            for letter, side in zip("AB", (fields, fields["other"]), strict=True):
                step = "no step" if side["step"] is None else f"step {side['step']}"
                self.invocation.print(f"{letter}  {side['target']} ({side['format']}, {step})")


def observer(invocation: Invocation, _: Mapping[str, Any]) -> Observer:
    """Return what prints both sides."""
    return _Sides(invocation)


def check(invocation: Invocation, _: Mapping[str, Any]) -> None:
    """Refuse a picture that cannot be drawn.

    Raises:
        UsageError, RefusedError: the file cannot be written, or stands there.
    """
    plot = invocation.options(DiffOptions).plot
    if plot:
        from ftckpt.commands.pictures.drawing import check_path

        check_path(plot, terminal=False)


def render(invocation: Invocation, report: DiffReport, _: Mapping[str, Any]) -> Result:
    """Print the tables, draw the picture, and give the verdict."""
    from .text import text, unread, verdict

    shown = invocation.options(DiffOptions)
    if not shown.top:
        invocation.report(tensors=())
    if not invocation.json:
        tolerance = invocation.document["tolerance"]
        for line in text(report, tolerance, top=shown.top):
            invocation.print(line)
        for one in unread(report.findings):
            invocation.found(one)
    if shown.plot:
        from .picture import draw

        sides = (invocation.document["target"], invocation.document["other"]["target"])
        names = " and ".join(one.rstrip("/").rpartition("/")[2] for one in sides)
        numbers = draw(report, shown.plot, names)
        invocation.report(plot={"file": shown.plot, "numbers": numbers})
        invocation.say(f"picture: {shown.plot}, numbers: {numbers}")
    message = verdict(report)
    if report.findings:
        told = report.code in (ExitCode.DENIED, ExitCode.UNAVAILABLE)
        hint = "" if told else "`ftckpt verify` says what is wrong with each"
        return invocation.fail(report.code, message, hint)
    invocation.print(message)
    return Result(report.code, message)
