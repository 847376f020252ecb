"""`ftckpt verify`: can it be trusted, and which evidence says so?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Relay, Result
from ftckpt.commands.cli.render import human_bytes, human_duration, printable, table
from ftckpt.errors import PRECEDENCE, ExitCode
from ftckpt.findings import Severity
from ftckpt.operations import checking

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.observer import Observer
    from ftckpt.verification.places import PlaceReport

operation = checking.verify


class Verdicts(Relay):
    """Prints the verdict on each checkpoint as it is made.

    Attributes:
        path: what was named.
        everything: whether all checkpoints of a root have their turn.
        told: the messages that were printed.
    """

    def __init__(self, invocation: Invocation, path: str, *, everything: bool) -> None:
        super().__init__(invocation)
        self.path, self.everything = path, everything
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
    return Verdicts(invocation, given["checkpoint"], everything=given["all_"])


def render(invocation: Invocation, report: PlaceReport, _: Mapping[str, Any]) -> Result:
    """Say what was not told of a single checkpoint."""
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
