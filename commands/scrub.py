"""`ftckpt scrub`: does what nobody reads still stand?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ftckpt.commands import verify
from ftckpt.commands.cli.alerts import AlertOptions, Alerts
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_duration
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations import checking

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.observer import Observer
    from ftckpt.verification.places import PlaceReport
    from ftckpt.verification.scrub import ScrubSummary

operation = checking.scrub
OPTIONS = (AlertOptions,)


def observer(invocation: Invocation, given: Mapping[str, Any]) -> Observer:
    """Return what prints each verdict."""
    return verify.Verdicts(invocation, given["root"], everything=True)


def check(invocation: Invocation, given: Mapping[str, Any]) -> None:
    """Begin to tell of what is found."""
    told_of = invocation.options(AlertOptions)
    invocation.groups[Alerts] = told_of.begin(invocation, "scrub", given["root"])


def render(invocation: Invocation, report: PlaceReport, given: Mapping[str, Any]) -> Result:
    """Say how far the scrub has come, and tell of what is bad."""
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
    return verify.render(invocation, report, given)


def _progress(scrub: ScrubSummary) -> str:
    """Say how far a scrub has come."""
    told = f"scrub: {scrub.checked} of {counted(scrub.checkpoints, 'checkpoint')} read"
    if scrub.unproven:
        told += f" ({scrub.unproven} without evidence of its content: ftckpt seal records it)"
    if scrub.oldest is None:
        return f"{told}; {scrub.never} not read since saved"
    age = human_duration(max(0.0, time.time() - scrub.oldest))
    return f"{told}; all of them in the last {age}"
