"""`ftckpt ls`: the checkpoints of a root."""

from __future__ import annotations

import time
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import brief_duration, human_bytes, table
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations import surveying

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftckpt.operations.surveying import ListedCheckpoint

operation = surveying.ls


def render(
    invocation: Invocation, report: Sequence[ListedCheckpoint], given: Mapping[str, Any]
) -> Result:
    """Print a table a run, and the sum."""
    runs = [(root, list(rows)) for root, rows in groupby(report, key=lambda one: one.root)]
    for number, (root, rows) in enumerate(runs):
        if len(runs) > 1:
            if number:
                invocation.print()
            invocation.print(f"{root}:")
        invocation.print(_table(root, rows))
    total = sum(one.bytes or 0 for one in report)
    name = "checkpoint" if not given["all_"] else "name"
    message = f"{counted(len(report), name)}, {human_bytes(total)}"
    invocation.print()
    invocation.print(message)
    return Result(ExitCode.OK, message)


def _table(root: str, rows: list[ListedCheckpoint]) -> str:
    head = ["step>", "name", "age>", "size>", "files>", "format", "class", "verified", "verdict"]
    head += ["kept by"]
    cells = [
        [
            "-" if one.step is None else one.step,
            one.path.removeprefix(root.rstrip("/") + "/"),
            "-" if one.age_s is None else brief_duration(max(0.0, one.age_s)),
            "-" if one.bytes is None else human_bytes(one.bytes),
            "-" if one.files is None else one.files,
            one.format or "-",
            one.entry_class,
            "yes" if one.verified else "sealed" if one.sealed else "no",
            _verdict(one),
            ", ".join(
                [
                    *(f"{name} points here" for name in one.pointers),
                    *(f"tag {word}" for word in one.tags),
                    *("pin of " + pin.who.removeprefix("by ") for pin in one.pins),
                ]
            ),
        ]
        for one in rows
    ]
    return table(head, cells)


def _verdict(one: ListedCheckpoint) -> str:
    """Return the last known verdict on the content: `content`, `values`, or what is wrong."""
    if one.verdict is None:
        return "-"
    said = one.verdict
    ago = brief_duration(round(max(0.0, time.time() - said.checked)))
    found = said.level if said.code == ExitCode.OK else ExitCode(said.code).name
    return f"{found}, {ago} ago"
