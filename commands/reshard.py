"""`ftckpt reshard`: the same format for another number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.transfer_report import PlanOptions, show_transfer
from ftckpt.operations import transferring

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.transfer.run import TransferReport

operation = transferring.reshard
OPTIONS = (PlanOptions,)


def render(invocation: Invocation, report: TransferReport, _: Mapping[str, Any]) -> Result:
    """Print what was written and proven."""
    return show_transfer(invocation, report)
