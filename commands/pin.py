"""`ftckpt pin`: keep a checkpoint, whatever the rules say."""

from __future__ import annotations

from typing import Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.pins_and_tags import CODES as MARKING
from ftckpt.commands.cli.pins_and_tags import RootArgument, StepArgument
from ftckpt.errors import ExitCode
from ftckpt.operations.definition import option

EXAMPLES = (
    ('ftckpt pin /ckpt/run7 120000 --reason "paper, figure 3"', "gc keeps it until it is unpinned"),
    ("ftckpt pin s3://run7/ckpt latest --reason release --owner team-x", "for somebody else"),
)
CODES = {ExitCode.OK: "pinned", **MARKING}


def command(
    invocation: Invocation,
    root: RootArgument,
    step: StepArgument,
    reason: Annotated[str, option("TEXT", "Why; shown to anyone who finds a full disk.")],
    owner: Annotated[str, option("NAME", "Who wants it kept; by default the login name.")] = "",
) -> Result:
    """Keep a checkpoint until it is unpinned, against all retention rules.

    Each owner has a pin of their own, and pinning again replaces the reason. What a pinned delta is
    built on is kept with it.
    """
    from ftckpt.api.marking import pin

    invocation.report(target=root)
    made = pin(root, step, reason, owner=owner, stores=invocation.stores)
    invocation.report(pins=[one.pin._asdict() | {"path": one.path} for one in made])
    who = made[0].pin.owner
    for one in made:
        invocation.print(f"pinned for {who}: {one.path}")
    return Result(ExitCode.OK, f"pinned for {who}")
