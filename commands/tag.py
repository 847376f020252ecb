"""`ftckpt tag`: put tags on a checkpoint, for `gc --keep-tag`."""

from __future__ import annotations

from typing import Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.pins_and_tags import CODES as MARKING
from ftckpt.commands.cli.pins_and_tags import RootArgument, StepArgument
from ftckpt.errors import ExitCode
from ftckpt.operations.definition import argument

EXAMPLES = (
    ("ftckpt tag /ckpt/run7 120000 milestone", "gc --keep-tag milestone keeps it"),
    ("ftckpt tag s3://run7/ckpt latest before-annealing released", "several at once"),
)
CODES = {ExitCode.OK: "tagged", **MARKING}


def command(
    invocation: Invocation,
    root: RootArgument,
    step: StepArgument,
    words: Annotated[list[str], argument("TAG...", "The words.")],
) -> Result:
    """Tag a checkpoint, for example to keep it with gc --keep-tag.

    A pin keeps a checkpoint whatever the policy says. A tag keeps it where a policy asks for it, so
    that one tier can keep its milestones and another need not.
    """
    from ftckpt.api.marking import tag

    invocation.report(target=root)
    made = tag(root, step, words, stores=invocation.stores)
    for one in made:
        invocation.print(f"tagged {', '.join(words)}: {one.path}")
    invocation.report(tags=[{"entry": t.entry, "path": t.path, "tags": t.tags} for t in made])
    return Result(ExitCode.OK, f"tagged {', '.join(words)}")
