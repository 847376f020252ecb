"""`ftckpt copy`: the same checkpoint on another tier, byte for byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Relay, Result
from ftckpt.commands.cli.render import finding_line, human_bytes, human_duration, printable
from ftckpt.commands.cli.transfer_report import taken_over
from ftckpt.errors import ExitCode
from ftckpt.findings import counted, listed
from ftckpt.operations import replicating

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.observer import Observer
    from ftckpt.replication.copy import CopyReport

operation = replicating.copy


class _Bases(Relay):
    """Prints each base when it is copied."""

    def end(self, report: CopyReport) -> None:
        """Print what was copied of one."""
        self.invocation.print(_line(report))


def observer(invocation: Invocation, _: Mapping[str, Any]) -> Observer:
    """Return what prints the bases."""
    return _Bases(invocation)


def render(invocation: Invocation, report: CopyReport, _: Mapping[str, Any]) -> Result:
    """Print what was copied, and by which evidence."""
    for note in report.notes:
        invocation.say(finding_line(note))
    if report.left:
        names = listed(report.left)
        invocation.say(f"left out, because they do not belong to it: {names} (--unmanaged)")
    invocation.print(_line(report))
    if report.already_there:
        return Result(ExitCode.OK, "the same checkpoint is there already")
    invocation.print(_EVIDENCE[report.evidence].format(covered=human_bytes(report.covered)))
    proven = "read back and equal" if report.proven else "not read back: --no-proof"
    seal = "" if report.sealed else "; its first manifest stands at the copy"
    invocation.print(f"{proven}{seal}")
    return Result(ExitCode.OK, f"copied {counted(report.files, 'file')}")


_EVIDENCE = {
    "manifest": "every block matches the manifest of the source",
    "crc32": "every record matches its CRC-32, {covered}; nothing covers the rest of the source",
    "none": "nothing was there to check the source against: ftckpt seal records digests",
}


def _line(report: CopyReport) -> str:
    amount = f"{counted(report.files, 'file')}, {human_bytes(report.nbytes)}"
    if report.already_there:
        return printable(f"there already: {amount}: {report.url}")
    seconds = max(report.seconds["copy"], 1e-6)
    speed = f"in {human_duration(seconds)} ({human_bytes(int(report.nbytes / seconds))}/s)"
    speed += taken_over(report.taken_over)
    return printable(f"copied {amount} {speed}: {report.url}")
