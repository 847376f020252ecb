"""`ftckpt repair`: take from a replica what is damaged, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import human_bytes, human_duration, printable
from ftckpt.commands.cli.transfer_report import taken_over
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations import replicating

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.replication.damage import BadBlock
    from ftckpt.replication.repair import RepairReport

operation = replicating.repair

# How many blocks a text lists; --json lists all.
_LISTED = 20


def render(invocation: Invocation, report: RepairReport, given: Mapping[str, Any]) -> Result:
    """Print what was wrong, and what was done about it."""
    replica = given["replica"] or "its own copies"
    for block in report.blocks[:_LISTED]:
        invocation.print(_line(block))
    if len(report.blocks) > _LISTED:
        invocation.print(f"and {len(report.blocks) - _LISTED} more")
    for name in report.long:
        invocation.print(f"{name}: bytes behind its end")
    if report.manifest:
        invocation.print("the manifest cannot be read")
    wrong = f"{counted(len(report.blocks), 'block')}, {human_bytes(report.bytes_damaged)}"
    if not report.done:
        message = f"would fetch {wrong}, from {replica}"
        if report.sound:
            message = f"nothing to repair: every block is right by {_EVIDENCE[report.evidence]}"
        invocation.print(message)
        return Result(ExitCode.OK, message)
    if report.already_there:
        invocation.print(printable(f"there already: {report.url}"))
        return Result(ExitCode.OK, "the mended checkpoint is there already")
    message = (
        f"fetched {wrong}; wrote {counted(report.files, 'file')}, {human_bytes(report.nbytes)}"
    )
    speed = f" in {human_duration(report.seconds['write'])}{taken_over(report.taken_over)}"
    invocation.print(printable(f"{message}{speed}: {report.url}"))
    invocation.print("read back and equal" if report.proven else "not read back: --no-proof")
    if report.kept:
        invocation.print(printable(f"the damaged one is kept: {report.kept}"))
    return Result(ExitCode.OK, message)


_EVIDENCE = {"manifest": "the manifest", "crc32": "the replica, whose CRC-32s match"}


def _line(block: BadBlock) -> str:
    end = block.offset + block.length
    return printable(f"{block.why}: {block.file} bytes {block.offset}-{end}")
