"""`ftckpt promote`: point a root at a checkpoint that was verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import printable
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations import promoting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.discovery.promotion import PointerMove
    from ftckpt.operations.promoting import Promotion

operation = promoting.promote


def render(invocation: Invocation, report: Promotion, _: Mapping[str, Any]) -> Result:
    """Print each pointer, or why none was moved."""
    invocation.close()
    if report.code is not ExitCode.OK:
        invocation.aside = True  # stdout is for the pointers that were moved
        for one in report.reports[-1].findings:
            invocation.found(one)
        hint = "no pointer was moved"
        if report.code is ExitCode.UNVERIFIED:
            hint = "ftckpt seal records digests; --level structure moves it without them"
        return invocation.fail(report.code, report.message, hint)
    would = "would move" if report.dry_run else "moved"
    for move in report.moves:
        invocation.print(printable(f"{would} {_line(move)}" if move.changes else _line(move)))
    changing = counted(sum(move.changes for move in report.moves), "pointer")
    if report.dry_run:
        return Result(ExitCode.OK, f"{changing} to move")
    moved = any(one.moved for one in report.pointers)
    said = f"{changing} moved to" if moved else "every pointer says"
    return Result(ExitCode.OK, f"{said} {report.url}{'' if moved else ' already'}")


def _line(one: PointerMove) -> str:
    if not one.changes:
        return f"{one.name} says {one.after} already"
    before = "new" if one.before is None else f"was {one.before}"
    return f"{one.name} to {one.after} ({before})"
