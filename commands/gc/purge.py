"""`ftckpt gc purge`: free the space of what has been in the trash long enough."""

from __future__ import annotations

from typing import Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.pins_and_tags import RootArgument
from ftckpt.commands.cli.render import block
from ftckpt.errors import ExitCode
from ftckpt.operations.definition import option, switch

from .outcome import ended, purged_lines, purged_record

EXAMPLES = (
    ("ftckpt gc purge /ckpt/run7", "free what was dropped at least a day ago"),
    ("ftckpt gc purge /ckpt/run7 --trash-ttl 7d", "a week; gc --apply takes the same flag"),
    ("ftckpt gc purge /ckpt/run7 --trash-ttl 0s --yes", "all of it, now, for good"),
)
CODES = {
    ExitCode.OK: "purged, also where nothing was due",
    ExitCode.UNSAFE: "a link stands where ftckpt's own files belong, or in what is purged",
    ExitCode.REFUSED: "another gc is at work, or the clock has gone back; nothing was touched",
    ExitCode.NOT_FOUND: "no such root",
    ExitCode.UNAVAILABLE: "storage failed; nothing was concluded",
    ExitCode.DENIED: "",
    ExitCode.NO_RESOURCE: "",
    ExitCode.UNSUPPORTED: "the store keeps no trash",
    ExitCode.PARTIAL: "some of it could not be removed; the next purge takes it up",
}


def command(
    invocation: Invocation,
    root: RootArgument,
    trash_ttl: Annotated[str, option("T", "Leave what was dropped less than so long ago.")] = "24h",
    yes: Annotated[bool, switch("--yes", "Confirm a --trash-ttl under one day.")] = False,
) -> Result:
    """Free the space of trash that is old enough.

    gc --apply does this first by itself. What a kept delta is built on by now, and what somebody
    has pinned or points to, stays; only what was dropped is removed, file by file.
    """
    from ftckpt.api.retaining import gc_purge

    invocation.report(target=root)
    purged = gc_purge(
        root, trash_ttl=trash_ttl, yes=yes, stores=invocation.stores, counter=invocation.counter
    )
    invocation.close()
    invocation.report(**purged_record(purged))
    lines = list(purged_lines(purged)) or [f"nothing in the trash of {root} is due"]
    invocation.print(block(*lines))
    return ended(invocation, lines[0], purged)
