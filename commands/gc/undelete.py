"""`ftckpt gc undelete`: restore checkpoints from the trash."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ftckpt.amounts import shown_duration
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import printable, table
from ftckpt.findings import counted
from ftckpt.operations import retaining

from .outcome import ended

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ftckpt.operations.retaining import TrashAnswer
    from ftckpt.retention.trash import Trashed

operation = retaining.gc_undelete


def render(invocation: Invocation, report: TrashAnswer, given: Mapping[str, Any]) -> Result:
    """Print what lies in the trash, or what is back."""
    things, undeleted = report.trash, report.undeleted
    if undeleted is None:
        nothing = f"nothing lies in the trash of {given['root']}"
        invocation.print(_listed(things) if things else nothing)
        return Result(message=f"{counted(len(things), 'thing')} in the trash")
    for path in report.paths:
        invocation.print(printable(f"{path} is back"))
    said = f"{len(undeleted.restored)} of {len(report.wanted)} are back"
    return ended(invocation, said, undeleted)


def _listed(things: Sequence[Trashed]) -> str:
    rows: list[list[Any]] = []
    now = time.time()
    for thing in things:
        when = datetime.fromtimestamp(thing.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
        ago = f"in the future, {when}" if thing.time > now else shown_duration(now - thing.time)
        step = "-" if thing.step is None else thing.step
        rows.append(
            [step, thing.entry, when, ago, "being purged" if thing.erasing else "can be had back"]
        )
    return table(["step>", "name", "dropped (UTC)", "ago>", "state"], rows)
