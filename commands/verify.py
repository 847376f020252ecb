"""`ftckpt verify`: can it be trusted, and which evidence says so?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Relay, Result
from ftckpt.commands.cli.render import human_bytes, human_duration, printable
from ftckpt.errors import ExitCode
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
        self.told.append(report.message)
        _tell(self.invocation, report)


def observer(invocation: Invocation, given: Mapping[str, Any]) -> Observer:
    """Return what prints each verdict."""
    return Verdicts(invocation, given["checkpoint"], everything=given["all_"])


def render(invocation: Invocation, report: PlaceReport, _: Mapping[str, Any]) -> Result:
    """Say what was not told of a single checkpoint."""
    if report.code is not ExitCode.OK and report.message not in invocation.screen.told:
        invocation.complain(report.code, report.message, report.hint)
    return Result(report.code, report.message, report.hint)


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
