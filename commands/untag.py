"""`ftckpt untag`: remove tags from a checkpoint."""

from __future__ import annotations

from typing import Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.pins_and_tags import CODES as MARKING
from ftckpt.commands.cli.pins_and_tags import RootArgument, StepArgument
from ftckpt.errors import ExitCode
from ftckpt.operations.definition import argument

EXAMPLES = (("ftckpt untag /ckpt/run7 120000 milestone", "gc --keep-tag milestone lets it go"),)
CODES = {ExitCode.OK: "untagged", **MARKING, ExitCode.NOT_FOUND: "no such root or tag"}


def command(
    invocation: Invocation,
    root: RootArgument,
    step: StepArgument,
    words: Annotated[list[str], argument("TAG...", "The words.")],
) -> Result:
    """Remove tags from a checkpoint, so that retention rules apply to it again.

    The checkpoint need not be there any more.
    """
    from ftckpt.api.marking import untag

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
