"""`ftckpt verify`: can it be trusted, and which evidence says so?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.alerts import AlertOptions, Alerts
from ftckpt.commands.cli.invocation import Invocation, Relay, Result
from ftckpt.commands.cli.render import brief_duration, human_bytes, human_duration, printable, table
from ftckpt.errors import PRECEDENCE, ExitCode, UsageError
from ftckpt.findings import Severity, counted
from ftckpt.operations import checking

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.observer import Observer
    from ftckpt.verification.places import PlaceReport
    from ftckpt.verification.scrub import ScrubSummary

operation = checking.verify
OPTIONS = (AlertOptions,)


class _Printer(Relay):
    """Prints the verdict on each checkpoint as it is made."""

    def __init__(self, invocation: Invocation, given: Mapping[str, Any]) -> None:
        super().__init__(invocation)
        self.path = given["checkpoint"]
        self.everything = given["all_"] or given["oldest_first"]
        self.told: list[str] = []

    def begin(self, url: str) -> None:
        """Say which checkpoint comes next."""
        if self.everything:
            self.invocation.print(f"{printable(url)}:")
        else:
            self.invocation.say(f"{self.path} is a root; taking {url}")

    def end(self, report: PlaceReport) -> None:
        """Print the verdict on a single checkpoint."""
        if self.everything and report.code is not ExitCode.OK:
            self.invocation.print(_failed(report))
        else:
            self.told.append(report.message)
            _tell(self.invocation, report)


def observer(invocation: Invocation, given: Mapping[str, Any]) -> Observer:
    """Return what prints each verdict."""
    return _Printer(invocation, given)


def check(invocation: Invocation, given: Mapping[str, Any]) -> None:
    """Begin to tell of what a scrub finds.

    Raises:
        UsageError: alerts of anything else.
    """
    told_of = invocation.options(AlertOptions)
    if not given["oldest_first"] and (told_of.on_alert or told_of.alert_url):
        raise UsageError("--on-alert and --alert-url go with --oldest-first")
    invocation.groups[Alerts] = told_of.begin(invocation, "verify", given["checkpoint"])


def render(invocation: Invocation, report: PlaceReport, _: Mapping[str, Any]) -> Result:
    """Say how far a scrub has come, and what was not told of a single checkpoint."""
    if report.scrub is not None:
        alerts = invocation.options(Alerts)
        invocation.print(_progress(report.scrub))
        for one in report.checkpoints:
            if one.code is not ExitCode.OK:
                kind = one.code.name.lower().replace("_", "-")
                alerts.add(kind, one.message, one.hint, [one.url.rstrip("/").rpartition("/")[2]])
        for finding in report.findings:
            if finding.severity == "error":
                alerts.add(finding.kind, finding.message, "", [finding.file or ""])
        alerts.complete()
    if len(report.checkpoints) > 1:
        invocation.print()
        invocation.print(_summary(report))
    if report.code is not ExitCode.OK and report.message not in invocation.screen.told:
        invocation.complain(report.code, report.message, report.hint)
    return Result(report.code, report.message, report.hint)


def _failed(report: PlaceReport) -> str:
    """Say that one of several did not pass; its findings stand above, and why is not said again."""
    code = f"{report.code.name} (exit code {int(report.code)})"
    return code if report.findings else f"{code}: {report.message}"


def _summary(report: PlaceReport) -> str:
    """Return the verdicts on all checkpoints of a root, one a row, with the worst finding."""
    from ftckpt.discovery.step_names import step_in_name

    prefix = report.url.rstrip("/") + "/"
    rows = [
        [
            _or_dash(step_in_name(_last(one.url)) if one.step is None else one.step),
            one.url.removeprefix(prefix),
            "ok" if one.code is ExitCode.OK else one.code.name,
            _worst(one),
        ]
        for one in report.checkpoints
    ]
    return table(["step>", "name", "verdict", "worst finding"], rows)


def _last(url: str) -> str:
    return url.rstrip("/").rpartition("/")[2]


def _or_dash(step: int | None) -> object:
    return "-" if step is None else step


def _worst(report: PlaceReport) -> str:
    """Return the kind and place of the worst finding, and how many there are beside it."""
    weights = list(Severity)
    found = [one for one in report.findings if one.severity is not Severity.NOTE]
    found.sort(key=lambda one: (weights.index(one.severity), PRECEDENCE.index(one.code)))
    if not found:
        return "" if report.code is ExitCode.OK else report.message
    first, *rest = found
    place = first.file or first.tensor
    said = f"{first.kind}: {place}" if place else f"{first.kind}"
    return f"{said}, and {len(rest)} more" if rest else said


def _progress(scrub: ScrubSummary) -> str:
    """Say how far a scrub has come."""
    told = f"scrub: {scrub.checked} of {counted(scrub.checkpoints, 'checkpoint')} read"
    if scrub.unproven:
        told += f" ({scrub.unproven} without evidence of its content: ftckpt seal records it)"
    if scrub.oldest is None:
        return f"{told}; {scrub.never} not read since saved"
    age = brief_duration(max(60.0, time.time() - scrub.oldest))
    return f"{told}; all of them in the last {age}"


def _tell(invocation: Invocation, report: PlaceReport) -> None:
    """Print the verdict on a single checkpoint."""
    if report.code is not ExitCode.OK:
        invocation.complain(report.code, report.message, report.hint)
        return
    rate = report.bytes_read / report.seconds if report.seconds else 0
    read = (
        f", {human_bytes(report.bytes_read)} in {human_duration(report.seconds)}"
        f" ({human_bytes(int(rate))}/s)"
        if report.bytes_read
        else ""
    )
    invocation.print(f"ok: {report.message}{read}")
    if report.hint:
        invocation.say(f"hint: {report.hint}")
