"""`ftckpt untag`: remove tags from a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.commands.cli.invocation import Result, invoked
from ftckpt.commands.cli.parameters import argument
from ftckpt.commands.cli.pins_and_tags import CODES as MARKING
from ftckpt.commands.cli.pins_and_tags import RootArgument, StepArgument
from ftckpt.errors import ExitCode

EXAMPLES = (("ftckpt untag /ckpt/run7 120000 milestone", "gc --keep-tag milestone lets it go"),)
CODES = {ExitCode.OK: "untagged", **MARKING, ExitCode.NOT_FOUND: "no such root or tag"}


def command(
    ctx: typer.Context,
    root: RootArgument,
    step: StepArgument,
    words: Annotated[list[str], argument("TAG...", "The words.")],
) -> Result:
    """Remove tags from a checkpoint, so that retention rules apply to it again.

    The checkpoint need not be there any more.
    """
    from ftckpt.api.marking import untag

    invocation = invoked(ctx)
    invocation.report(target=root)
    taken = [
        (one, word)
        for one in untag(root, step, words, stores=invocation.stores)
        for word in one.tags
    ]
    for one, word in taken:
        invocation.print(f"no longer tagged {word}: {one.path}")
    invocation.report(
        tags=[{"entry": one.entry, "path": one.path, "tag": word} for one, word in taken]
    )
    return Result(ExitCode.OK, f"untagged {', '.join(words)}")
