"""`ftckpt pins`: who keeps what, and why."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.pins_and_tags import CODES as MARKING
from ftckpt.commands.cli.pins_and_tags import RootArgument
from ftckpt.commands.cli.render import table
from ftckpt.errors import ExitCode
from ftckpt.findings import counted

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


def command(invocation: Invocation, root: RootArgument) -> Result:
    """List the pins and tags of a root.

    Those of checkpoints that are not there any more are listed too.
    """
    from ftckpt.api.marking import pins

    invocation.report(target=root)
    marks = pins(root, stores=invocation.stores)
    pinned = [p.pin._asdict() | {"path": p.path, "present": p.present} for p in marks.pins]
    tagged: list[dict[str, Any]] = [
        {"entry": t.entry, "tags": t.tags, "path": t.path, "present": t.present} for t in marks.tags
    ]
    invocation.report(pins=pinned, tags=tagged)
    if pinned:
        head = ["checkpoint", "there", "since", "owner", "reason"]
        rows = [[p["path"], _there(p), _since(p["time"]), p["owner"], p["reason"]] for p in pinned]
        invocation.print(table(head, rows))
    if tagged:
        rows = [[t["path"], _there(t), ", ".join(t["tags"])] for t in tagged]
        if pinned:
            invocation.print()
        invocation.print(table(["checkpoint", "there", "tags"], rows))
    if not pinned and not tagged:
        invocation.print(f"nothing is pinned or tagged in {root}")
    message = f"{counted(len(pinned), 'pin')}, {counted(len(tagged), 'tagged checkpoint')}"
    return Result(ExitCode.OK, message)


def _there(row: dict[str, Any]) -> str:
    return "yes" if row["present"] else "no"


def _since(time: float | None) -> str:
    try:
        return "-" if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "-"
