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
    kept = [_kept_by(one) for one in rows]
    columns: dict[str, list[object]] = {
        "step>": ["-" if one.step is None else one.step for one in rows],
        "name": [one.path.removeprefix(root.rstrip("/") + "/") for one in rows],
        "age>": ["-" if one.age_s is None else _age(one.age_s) for one in rows],
        "size>": ["-" if one.bytes is None else human_bytes(one.bytes) for one in rows],
        "format": [one.format or "-" for one in rows],
        "class": [one.entry_class for one in rows],
        "verdict": [_verdict(one) for one in rows],
    }
    if any(kept):
        columns["kept by"] = [*kept]
    return table(list(columns), [*zip(*columns.values(), strict=True)])


def _kept_by(one: ListedCheckpoint) -> str:
    return ", ".join(
        [
            *(f"{name} points here" for name in one.pointers),
            *(f"tag {word}" for word in one.tags),
            *("pin of " + pin.who.removeprefix("by ") for pin in one.pins),
        ]
    )


def _age(seconds: float) -> str:
    """Return an age to the minute: nobody chooses a checkpoint by its seconds."""
    whole = max(0.0, seconds)
    return brief_duration(whole if whole < 60 else whole // 60 * 60)


def _verdict(one: ListedCheckpoint) -> str:
    """Return what the ledger says of it as it is now and since when, else what its seal says."""
    said = one.verdict
    if said is None:
        return "sealed after a check" if one.verified else "sealed" if one.sealed else "-"
    ago = " ".join(_age(time.time() - said.checked).split()[:2])
    found = f"{said.level} ok" if said.code == ExitCode.OK else ExitCode(said.code).name
    return f"{found}, {ago} ago"
