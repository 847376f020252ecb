"""`ftckpt pins`: who keeps what, and why."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import table
from ftckpt.findings import counted
from ftckpt.operations import marking

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.operations.marking import Marks

operation = marking.pins


def render(invocation: Invocation, report: Marks, given: Mapping[str, Any]) -> Result:
    """Print the pins, and the tags."""
    pins, tags = report
    if pins:
        head = ["checkpoint", "there", "since", "owner", "reason"]
        rows = [
            [p.path, _there(p.present), _since(p.pin.time), p.pin.owner, p.pin.reason] for p in pins
        ]
        invocation.print(table(head, rows))
    if tags:
        if pins:
            invocation.print()
        rows = [[t.path, _there(t.present), ", ".join(t.tags)] for t in tags]
        invocation.print(table(["checkpoint", "there", "tags"], rows))
    if not pins and not tags:
        invocation.print(f"nothing is pinned or tagged in {given['root']}")
    message = f"{counted(len(pins), 'pin')}, {counted(len(tags), 'tagged checkpoint')}"
    return Result(message=message)


def _there(present: bool) -> str:
    return "yes" if present else "no"


def _since(time: float | None) -> str:
    try:
        return "-" if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "-"
