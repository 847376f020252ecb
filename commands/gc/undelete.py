"""`ftckpt gc undelete`: restore checkpoints from the trash."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from ftckpt.amounts import shown_duration
from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.pins_and_tags import RootArgument
from ftckpt.commands.cli.render import printable, table
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations.definition import argument, switch

from .outcome import ended, rest_record, trashed_record

if TYPE_CHECKING:
    from ftckpt.retention.trash import Trashed

EXAMPLES = (
    ("ftckpt gc undelete /ckpt/run7", "list what lies in the trash"),
    ("ftckpt gc undelete /ckpt/run7 12000 step-13000", "these have their names again"),
    ("ftckpt gc undelete /ckpt/run7 --all", "everything that was dropped and is not purged yet"),
)
CODES = {
    ExitCode.OK: "listed, or had back",
    ExitCode.UNSAFE: "a link stands where ftckpt's own files belong",
    ExitCode.REFUSED: "something has that name now, it is being purged, or another gc is at work",
    ExitCode.NOT_FOUND: "no such root, or nothing of that name in its trash",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "",
    ExitCode.UNSUPPORTED: "the store keeps no trash",
    ExitCode.PARTIAL: "some of them could not be had back",
}


def command(
    invocation: Invocation,
    root: RootArgument,
    names: Annotated[
        list[str] | None,
        argument("STEP|NAME...", "What to have back; without, the trash is listed."),
    ] = None,
    everything: Annotated[
        bool, switch("--all", "All of it; of several of one name the last.")
    ] = False,
) -> Result:
    """Restore checkpoints from the trash (without a name: list it).

    Nothing that stands in its place now is replaced. The next gc by the same rules drops it again,
    so pin what is to stay.
    """
    from ftckpt.api.retaining import gc_undelete

    invocation.report(target=root)
    answer = gc_undelete(root, names or (), all_=everything, stores=invocation.stores)
    things, undeleted = answer.trash, answer.undeleted
    if undeleted is None:
        invocation.report(trash=[trashed_record(t) for t in things])
        invocation.print(_listed(things) if things else f"nothing lies in the trash of {root}")
        return Result(ExitCode.OK, f"{counted(len(things), 'thing')} in the trash")
    invocation.report(
        restored=[trashed_record(t) for t in undeleted.restored], **rest_record(undeleted)
    )
    for path in answer.paths:
        invocation.print(printable(f"{path} is back"))
    return ended(
        invocation, f"{len(undeleted.restored)} of {len(answer.wanted)} are back", undeleted
    )


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
