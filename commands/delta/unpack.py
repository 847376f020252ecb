"""`ftckpt delta unpack`: a delta as a checkpoint that needs no base."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.transfer_report import PlanOptions, show_transfer
from ftckpt.operations import packing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.transfer.run import TransferReport

operation = packing.delta_unpack
OPTIONS = (PlanOptions,)


def render(invocation: Invocation, report: TransferReport, given: Mapping[str, Any]) -> Result:
    """Print what was written and proven."""
    result = show_transfer(invocation, report)
    if report.plan is None and not given["no_proof"]:
        files = ", in the same files" if invocation.document["original"] else ""
        content = invocation.document["content"]
        invocation.print(f"content {content}, as it was packed{files}")
    return result
