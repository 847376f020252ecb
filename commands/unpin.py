"""`ftckpt unpin`: give a pinned checkpoint back to the rules."""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.commands.cli.invocation import Result, invoked
from ftckpt.commands.cli.pins_and_tags import CODES as MARKING
from ftckpt.commands.cli.pins_and_tags import (
    RootArgument,
    StepArgument,
    login_name,
    open_roots,
    record,
)
from ftckpt.errors import ExitCode, NotFoundError, UsageError

EXAMPLES = (
    ("ftckpt unpin /ckpt/run7 120000", "take your own pin away"),
    ("ftckpt unpin /ckpt/run7 120000 --owner alice", "take away the pin of somebody else"),
)
CODES = {ExitCode.OK: "unpinned", **MARKING, ExitCode.NOT_FOUND: "no such root or pin"}


def command(
    ctx: typer.Context,
    root: RootArgument,
    step: StepArgument,
    owner: Annotated[
        str, typer.Option(metavar="NAME", help="Whose pin; by default the login name's.")
    ] = "",
    everybody: Annotated[
        bool, typer.Option("--everybody", help="Take away the pins of all owners.")
    ] = False,
) -> Result:
    """Unpin a checkpoint, so that retention rules apply to it again.

    The checkpoint need not be there any more.
    """
    from ftckpt.retention.policy.select import Chosen, choose_marked
    from ftckpt.retention.records import pins

    invocation = invoked(ctx)
    if owner and everybody:
        raise UsageError("--owner and --everybody contradict each other")
    roots = open_roots(invocation, root)
    all_pins = [(Chosen(r, p.entry), p) for r in roots for p in pins.pins(r)]
    chosen = choose_marked(roots, step, [where for where, _ in all_pins])
    who = None if everybody else owner or login_name()
    owners: dict[str, set[str]] = {c.path: set() for c in chosen}
    for where, pin in all_pins:
        owners.get(where.path, set()).add(pin.owner)
    theirs = set().union(*owners.values())
    if not theirs or (who is not None and who not in theirs):
        hint = f"pinned by {', '.join(sorted(theirs))}: --owner says whose" if theirs else ""
        by = "" if who is None else f" by {who}"
        raise NotFoundError(f"{chosen[0].url} is not pinned{by}", hint=hint)
    held = [c for c in chosen if (owners[c.path] if who is None else who in owners[c.path])]
    gone = [(c, p) for c in held for p in pins.unpin(c.root, c.name, owner=who)]
    for where, pin in gone:
        record([where], "unpinned", owner=pin.owner, reason=pin.reason, by=login_name())
        invocation.print(f"unpinned, was pinned by {pin.owner} ({pin.reason}): {where.url}")
    invocation.report(pins=[p._asdict() | {"path": c.url} for c, p in gone])
    return Result(ExitCode.OK, "unpinned")
