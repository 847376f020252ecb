"""`ftckpt verify`: can it be trusted, and which evidence says so?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.alerts import AlertOptions, Alerts
from ftckpt.commands.cli.invocation import Invocation, Relay, Result
from ftckpt.commands.cli.render import human_bytes, human_duration, printable
from ftckpt.errors import ExitCode, UsageError
from ftckpt.findings import counted
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
    if report.code is not ExitCode.OK and report.message not in invocation.screen.told:
        invocation.complain(report.code, report.message, report.hint)
    return Result(report.code, report.message, report.hint)


def _progress(scrub: ScrubSummary) -> str:
    """Say how far a scrub has come."""
    told = f"scrub: {scrub.checked} of {counted(scrub.checkpoints, 'checkpoint')} read"
    if scrub.unproven:
        told += f" ({scrub.unproven} without evidence of its content: ftckpt seal records it)"
    if scrub.oldest is None:
        return f"{told}; {scrub.never} not read since saved"
    age = human_duration(max(0.0, time.time() - scrub.oldest))
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
