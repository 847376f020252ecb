"""`ftckpt untag`: remove tags from a checkpoint."""

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
from ftckpt.errors import ExitCode, NotFoundError

EXAMPLES = (("ftckpt untag /ckpt/run7 120000 milestone", "gc --keep-tag milestone lets it go"),)
CODES = {ExitCode.OK: "untagged", **MARKING, ExitCode.NOT_FOUND: "no such root or tag"}


def command(
    ctx: typer.Context,
    root: RootArgument,
    step: StepArgument,
    words: Annotated[list[str], typer.Argument(metavar="TAG...", help="The words.")],
) -> Result:
    """Remove tags from a checkpoint, so that retention rules apply to it again.

    The checkpoint need not be there any more.
    """
    from ftckpt.retention.policy.select import Chosen, choose_marked
    from ftckpt.retention.records import tags

    invocation = invoked(ctx)
    roots = open_roots(invocation, root)
    known = [(Chosen(r, entry), has) for r in roots for entry, has in tags.tags(r).items()]
    chosen = choose_marked(roots, step, [where for where, _ in known])
    has = {where.path: set(tagged) for where, tagged in known}
    taken = [(one, word) for one in chosen for word in words if word in has.get(one.path, ())]
    absent = set(words) - {word for _, word in taken}
    if absent:
        raise NotFoundError(f"{chosen[0].url} is not tagged {' or '.join(sorted(absent))}")
    for one, word in taken:
        tags.untag(one.root, one.name, word)
        record([one], "untagged", tag=word, by=login_name())
        invocation.print(f"no longer tagged {word}: {one.url}")
    invocation.report(tags=[{"entry": c.name, "path": c.url, "tag": word} for c, word in taken])
    return Result(ExitCode.OK, f"untagged {', '.join(words)}")
