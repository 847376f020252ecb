"""`ftckpt unpin`: give a pinned checkpoint back to the rules."""

from __future__ import annotations

from typing import Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.pins_and_tags import CODES as MARKING
from ftckpt.commands.cli.pins_and_tags import RootArgument, StepArgument
from ftckpt.errors import ExitCode
from ftckpt.operations.definition import option, switch

EXAMPLES = (
    ("ftckpt unpin /ckpt/run7 120000", "take your own pin away"),
    ("ftckpt unpin /ckpt/run7 120000 --owner alice", "take away the pin of somebody else"),
)
CODES = {ExitCode.OK: "unpinned", **MARKING, ExitCode.NOT_FOUND: "no such root or pin"}


def command(
    invocation: Invocation,
    root: RootArgument,
    step: StepArgument,
    owner: Annotated[str, option("NAME", "Whose pin; by default the login name's.")] = "",
    everybody: Annotated[bool, switch("--everybody", "Take away the pins of all owners.")] = False,
) -> Result:
    """Unpin a checkpoint, so that retention rules apply to it again.

    The checkpoint need not be there any more.
    """
    from ftckpt.api.marking import unpin

    invocation.report(target=root)
    gone = unpin(root, step, owner=owner, everybody=everybody, stores=invocation.stores)
    for one in gone:
        was = f"was pinned by {one.pin.owner} ({one.pin.reason})"
        invocation.print(f"unpinned, {was}: {one.path}")
    invocation.report(pins=[one.pin._asdict() | {"path": one.path} for one in gone])
    return Result(ExitCode.OK, "unpinned")
