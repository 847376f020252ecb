"""`ftckpt status`: a run's checkpoint health, for a person and for a monitor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ftckpt.commands.cli.alerts import AlertOptions, Alerts
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.operations import surveying
from ftckpt.operations.definition import option
from ftckpt.storage.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.health import Status

operation = surveying.status


@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    """What is drawn."""

    TITLE: ClassVar[str] = "Options"

    plot: Annotated[str, option("FILE", "Draw saves over time: .png, .svg or .html.")] = ""


OPTIONS = (AlertOptions, PictureOptions)


def check(invocation: Invocation, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Begin to tell of what is found, and take the policy of the user's settings.

    Raises:
        UsageError, RefusedError: the webhook is not a URL; the picture cannot be written there.
    """
    root = given["root"]
    if given["parts"] or not root:
        return given
    told_of, plot = invocation.options(AlertOptions), invocation.options(PictureOptions).plot
    invocation.groups[Alerts] = told_of.begin(invocation, "status", root)
    if not given["policy"] and "policies" in read_settings().tables:
        from ftckpt.commands.config.defaults import policy_of

        if known := policy_of(root):
            given = {**given, "policy": known.file}
            invocation.say(f"policy: {known.file} ({known.where})")
    if plot:
        from ftckpt.commands.pictures.drawing import check_path

        check_path(plot, terminal=False)
    return given


def render(invocation: Invocation, report: Status, given: Mapping[str, Any]) -> Result:
    """Print each run, or how far parts are; draw the picture, and tell who wants to be told."""
    invocation.close()
    if given["parts"]:
        from .divided import show_parts

        return show_parts(invocation, report)
    from .text import show

    show(invocation, report)
    plot = invocation.options(PictureOptions).plot
    if plot:
        from .text import draw

        numbers = draw(report, plot)
        invocation.report(plot=plot, numbers=numbers)
        invocation.say(f"drawn to {plot}, the numbers to {numbers}")
    alerts = invocation.options(Alerts)
    for run in report.runs:
        where = f"{run.survey.url}: " if len(report.runs) > 1 else ""
        for alert in run.alerts:
            about = [f"{where}{name}" for name in alert.about or ([""] if where else [])]
            alerts.add(alert.kind, where + alert.message, alert.hint, about)
    alerts.complete()
    return Result(report.code, report.message, report.hint)
