"""`ftckpt convert`: the same state in another format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.transfer_report import PlanOptions, show_transfer
from ftckpt.operations import transferring

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.transfer.run import TransferReport

operation = transferring.convert
OPTIONS = (PlanOptions,)


def render(invocation: Invocation, report: TransferReport, _: Mapping[str, Any]) -> Result:
    """Print what was written and proven, and how far computed values are from their sources."""
    result = show_transfer(invocation, report)
    rounding, deviation = (invocation.document.get(one) for one in ("rounding", "deviation"))
    if rounding is not None and rounding["tensor"]:
        infinite = rounding["infinite"]
        beyond = f"; {infinite:,} values are beyond the type and infinite" if infinite else ""
        invocation.print(
            f"rounded once from float32: at most {rounding['largest']:.2g} of a value, in"
            f" {rounding['tensor']}{beyond}"
        )
    if deviation is not None:
        invocation.print(
            f"quantised: off by at most {deviation['largest']:.2g} of a block's largest, in"
            f" {deviation['tensor']}"
        )
    return result
