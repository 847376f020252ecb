"""`ftckpt delta info`: what a chain of deltas is made of, and what it costs to restore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_bytes, table
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations import packing

from .answer import share_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.formats.delta.survey import Link
    from ftckpt.operations.packing import DeltaReport

operation = packing.delta_info


def render(invocation: Invocation, report: DeltaReport, given: Mapping[str, Any]) -> Result:
    """Print the chain, the shares, and the advice."""
    if not invocation.json:
        _print(invocation, report)
    if report.broken is not None:
        hint = "ftckpt verify says more" if report.followed else _HINT
        return invocation.fail(report.code, report.message, hint)
    if report.rates is not None and report.advice is not None:
        rates, workers = report.rates, counted(report.workers, "worker")
        invocation.print()
        invocation.print(
            f"measured with {workers}: encodes {human_bytes(int(rates.encode))}/s, "
            f"decodes {human_bytes(int(rates.decode))}/s, reads {human_bytes(int(rates.read))}/s"
        )
        invocation.print(report.advice.sentence)
        if not given["storage_bw"]:
            invocation.say("the storage is taken to be as fast as it was just read; --storage-bw")
    deltas = sum(link.blocks > 0 or link.base is not None for link in report.chain)
    read, blocks = human_bytes(report.restore.bytes_read), counted(report.restore.blocks, "block")
    return Result(
        ExitCode.OK,
        f"{counted(deltas, 'delta')} in the chain; a restore reads {read} and decodes {blocks}",
    )


_HINT = "bring the base back, or say where it is: --base PATH"


def _print(invocation: Invocation, report: DeltaReport) -> None:
    rows = [_row(link) for link in report.chain]
    columns = ["step>", "stored>", "ratio>", "restore reads>", "blocks>", "known by", "checkpoint"]
    invocation.print(table(columns, rows))
    invocation.print()
    invocation.print(share_table("component", report.components))
    invocation.print()
    invocation.print(share_table("method", report.methods))
    if report.broken is None:
        read, blocks = report.restore
        links = counted(len(report.chain), "checkpoint")
        invocation.print()
        invocation.print(
            f"a restore reads {human_bytes(read)} of {links} and decodes {counted(blocks, 'block')}"
        )


def _row(link: Link) -> list[object]:
    return [
        "" if link.step is None else link.step,
        human_bytes(link.stored),
        "" if link.ratio is None else f"{link.ratio:.2f}",
        human_bytes(link.read),
        link.blocks or "",
        link.identity,
        f"{link.url} ({link.format})",
    ]
