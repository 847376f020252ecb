"""`ftckpt tag`: put tags on a checkpoint, for `gc --keep-tag`."""

from __future__ import annotations

import time
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
from ftckpt.errors import ExitCode

EXAMPLES = (
    ("ftckpt tag /ckpt/run7 120000 milestone", "gc --keep-tag milestone keeps it"),
    ("ftckpt tag s3://run7/ckpt latest before-annealing released", "several at once"),
)
CODES = {ExitCode.OK: "tagged", **MARKING}


def command(
    ctx: typer.Context,
    root: RootArgument,
    step: StepArgument,
    words: Annotated[list[str], typer.Argument(metavar="TAG...", help="The words.")],
) -> Result:
    """Tag a checkpoint, for example to keep it with gc --keep-tag.

    A pin keeps a checkpoint whatever the policy says. A tag keeps it where a policy asks for it, so
    that one tier can keep its milestones and another need not.
    """
    from ftckpt.retention.policy.select import choose_entries
    from ftckpt.retention.records import tags

    invocation = invoked(ctx)
    chosen = choose_entries(open_roots(invocation, root), step)
    who = login_name()
    for one in chosen:
        for word in words:
            tags.tag(one.root, one.name, word, owner=who, now=time.time())
            record([one], "tagged", tag=word, by=who)
        invocation.print(f"tagged {', '.join(words)}: {one.url}")
    invocation.report(tags=[{"entry": c.name, "path": c.url, "tags": words} for c in chosen])
    return Result(ExitCode.OK, f"tagged {', '.join(words)}")
