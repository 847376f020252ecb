"""What is printed of a part of an operation that several machines share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations.many import Machines, PartReport

from .invocation import Result
from .render import human_bytes, human_duration, printable

if TYPE_CHECKING:
    from .invocation import Invocation


def show_part(invocation: Invocation, report: PartReport, division: Machines) -> Result:
    """Print what a part did, which says nothing of the whole."""
    part, record = report.part, report.made
    did = f"{counted(part.tasks, 'task')}, {human_bytes(record.nbytes)}"
    when = f"done before, by {part.host}" if part.done_before else human_duration(record.seconds)
    message = f"part {record.part}: {did}, {when}"
    if record.raised is not None:
        message += f"; ended by an error: {record.raised.get('message')}"
    elif record.errors:
        message += f"; {counted(record.errors, 'error')} found"
    invocation.print(printable(f"{message}: {part.record}"))
    if division.finish_last:
        # Launchers end all processes where one fails; who is last gives the verdict.
        return Result(ExitCode.OK, message)
    hint = "the answer is that of the same line with --finish"
    if report.code is not ExitCode.OK:
        return invocation.fail(report.code, message, hint)
    invocation.say(f"hint: {hint}")
    return Result(ExitCode.OK, message)
