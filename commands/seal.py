"""`ftckpt seal`: record digests, so that any later change is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_bytes, human_duration, printable
from ftckpt.findings import counted
from ftckpt.operations import checking

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.operations.checking import SealedCheckpoint

operation = checking.seal


def render(invocation: Invocation, report: SealedCheckpoint, _: Mapping[str, Any]) -> Result:
    """Print where the manifest is, and which check passed before."""
    files = report.files
    message = (
        f"sealed {counted(files.count, 'file')}, {human_bytes(files.bytes)}"
        if report.written
        else "sealed already, with the same content"
    )
    invocation.print(printable(f"{message}: {report.manifest}"))
    if report.sha256:
        invocation.print(printable(f"SHA-256 of every file: {report.sha256}"))
    if report.signature:
        invocation.print(printable(f"signed: {report.signature}"))
    checked = report.verdict
    invocation.say(f"checked before: {checked.message} in {human_duration(checked.seconds)}")
    return Result(message=message)
