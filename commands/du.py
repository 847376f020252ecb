"""`ftckpt du`: where the bytes of a checkpoint are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import branch, human_bytes, human_count, table
from ftckpt.findings import counted
from ftckpt.operations import looking

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.operations.looking import BytesHeld

operation = looking.du


def render(invocation: Invocation, report: BytesHeld, given: Mapping[str, Any]) -> Result:
    """Print a row a prefix, and the sum."""
    rows = [
        [
            human_bytes(one.bytes),
            f"{100 * one.bytes / report.bytes:.1f} %" if report.bytes else "-",
            human_count(one.elements),
            one.tensors,
            branch(one.component, one.prefix, one.depth),
        ]
        for one in report.sums
    ]
    invocation.print(table(["bytes>", "share>", "elements>", "tensors>", "name"], rows))
    message = f"{counted(report.tensors, 'tensor')}, {human_bytes(report.bytes)}"
    invocation.print()
    invocation.print(f"{message}; the files have {human_bytes(report.files)}")
    return Result(message=message)
