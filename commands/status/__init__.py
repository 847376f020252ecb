"""`ftckpt status`: a run's checkpoint health, for a person and for a monitor."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from ftckpt.amounts import Duration, seconds
from ftckpt.commands.cli.alerts import AlertOptions, Alerts
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.terminal import is_terminal, write
from ftckpt.errors import UsageError
from ftckpt.operations import surveying
from ftckpt.operations.definition import option
from ftckpt.storage.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.health import Status

operation = surveying.status
_SHORTEST = 1.0  # a root of an object store is listed at each look


@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    """What is drawn."""

    TITLE: ClassVar[str] = "Options"

    plot: Annotated[str, option("FILE", "Draw saves over time: .png, .svg or .html.")] = ""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """How often it is looked at."""

    TITLE: ClassVar[str] = "Options"

    watch: Annotated[Duration, option("T", "Look again every T, until Ctrl-C: 10s.")] = ""


OPTIONS = (AlertOptions, PictureOptions, WatchOptions)


def check(invocation: Invocation, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Begin to tell of what is found, and take the policy of the user's settings.

    Raises:
        UsageError, RefusedError: the webhook is not a URL; the picture cannot be written there.
    """
    root = given["root"]
    if given["parts"] or not root:
        return given
    if _every(invocation) is not None:
        _require_watchable(invocation, given)
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
    while (every := _every(invocation)) is not None:
        time.sleep(every)
        report = surveying.status(**given, stores=invocation.stores)
        _clear(invocation)
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


def _every(invocation: Invocation) -> float | None:
    """Return the seconds between two looks; None where one is wanted."""
    watch = invocation.options(WatchOptions).watch
    return None if watch == "" else seconds(watch, "--watch")


def _require_watchable(invocation: Invocation, given: Mapping[str, Any]) -> None:
    """Refuse what is for a single look, of which `--watch` is none.

    Raises:
        UsageError: what does not go with it.
    """
    every, told_of = _every(invocation), invocation.options(AlertOptions)
    if every is not None and every < _SHORTEST:
        raise UsageError(f"--watch {every:g}s lists the root all the time: 1s is the least")
    plot = invocation.options(PictureOptions).plot
    single = {
        "--json": invocation.json, "--plot": plot, "--prometheus": given["prometheus"],
        "--on-alert": told_of.on_alert, "--alert-url": told_of.alert_url,
    }  # fmt: skip
    if one := next((flag for flag, value in single.items() if value), None):
        raise UsageError(f"--watch is for a person who looks on, and {one} is for a single look")


def _clear(invocation: Invocation) -> None:
    """Begin another look: on an empty screen, or below the last one with the time."""
    now = datetime.now(UTC)
    if is_terminal(sys.stdout):
        write(sys.stdout, "\x1b[H\x1b[2J")
        invocation.print(f"{now:%H:%M:%S} UTC")
    else:
        invocation.print()
        invocation.print(f"{now:%Y-%m-%d %H:%M:%S} UTC")
