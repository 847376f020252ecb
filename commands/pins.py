"""`ftckpt pins`: who keeps what, and why."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from ftckpt.commands.cli.invocation import Result, invoked
from ftckpt.commands.cli.pins_and_tags import CODES as MARKING
from ftckpt.commands.cli.pins_and_tags import RootArgument, open_roots
from ftckpt.commands.cli.render import table
from ftckpt.errors import ExitCode
from ftckpt.findings import counted

if TYPE_CHECKING:
    from ftckpt.discovery.roots import Root

EXAMPLES = (
    ("ftckpt pins /ckpt/run7", "every pin and tag, with owner and reason"),
    ("ftckpt pins /ckpt/run7 --json | jq -r '.pins[].path'", "only the checkpoints"),
)
CODES = {
    ExitCode.OK: "listed, also where there is none",
    **MARKING,
    ExitCode.NOT_FOUND: "no such root",
    ExitCode.DENIED: "",
}


def command(ctx: typer.Context, root: RootArgument) -> Result:
    """List the pins and tags of a root.

    Those of checkpoints that are not there any more are listed too.
    """
    invocation = invoked(ctx)
    roots = open_roots(invocation, root)
    pinned = [row for one in roots for row in _pins(one)]
    tagged = [row for one in roots for row in _tags(one)]
    invocation.report(pins=pinned, tags=tagged)
    if pinned:
        head = ["checkpoint", "there", "since", "owner", "reason"]
        rows = [[p["path"], _there(p), _since(p["time"]), p["owner"], p["reason"]] for p in pinned]
        invocation.print(table(head, rows))
    if tagged:
        rows = [[t["path"], _there(t), ", ".join(t["tags"])] for t in tagged]
        invocation.print(("\n" if pinned else "") + table(["checkpoint", "there", "tags"], rows))
    if not pinned and not tagged:
        invocation.print(f"nothing is pinned or tagged in {root}")
    message = f"{counted(len(pinned), 'pin')}, {counted(len(tagged), 'tagged checkpoint')}"
    return Result(ExitCode.OK, message)


def _pins(root: Root) -> Iterator[dict[str, Any]]:
    from ftckpt.retention.records import pins

    for pin in pins.pins(root):
        yield pin._asdict() | _where(root, pin.entry)


def _tags(root: Root) -> Iterator[dict[str, Any]]:
    from ftckpt.retention.records import tags

    for entry, words in tags.tags(root).items():
        yield {"entry": entry, "tags": words} | _where(root, entry)


def _where(root: Root, entry: str) -> dict[str, Any]:
    from ftckpt.retention.policy.select import Chosen

    return {
        "path": Chosen(root, entry).url,
        "present": any(c.path == entry for c in root.candidates),
    }


def _there(row: dict[str, Any]) -> str:
    return "yes" if row["present"] else "no"


def _since(time: float | None) -> str:
    try:
        return "-" if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "-"
