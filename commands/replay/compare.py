"""`ftckpt replay compare`: the logs of runs that were made before."""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.commands.cli.invocation import Result, invoked
from ftckpt.commands.cli.option_values import check_file
from ftckpt.errors import ExitCode

from .answer import record, result, text
from .page import write_page

STORAGE = False
EXAMPLES = (
    (
        "ftckpt replay compare ftckpt-replay-1/baseline-1/log ftckpt-replay-1/restart-1/log",
        "logs that ftckpt.hook or replay run left, bit by bit",
    ),
    (
        "ftckpt replay compare restart-a.log restart-b.log --reference run7.log",
        "what a console printed, to the digits that it printed",
    ),
    (
        r"ftckpt replay compare a.txt b.txt --pattern 'it=(?P<step>\d+) l=(?P<loss>\S+)'",
        "lines of your own form: a group for the step, and one for each number",
    ),
)
CODES = {
    ExitCode.OK: "the logs are equal, as far as they can show it",
    ExitCode.DIFFERENT: "they differ; the first event that does is named",
    ExitCode.CORRUPT: "a log of ftckpt's is damaged",
    ExitCode.UNVERIFIED: "they have no steps in common, lack some, or log NaN",
    ExitCode.NOT_FOUND: "the log does not exist",
    ExitCode.UNSUPPORTED: "no line of a log shows a step",
}


def command(
    ctx: typer.Context,
    log_a: Annotated[str, typer.Argument(metavar="LOG_A", help="Directory, JSON lines, or text.")],
    log_b: Annotated[str, typer.Argument(metavar="LOG_B", help="The log of another run.")],
    reference: Annotated[
        str,
        typer.Option(metavar="LOG", help="The uninterrupted run; A and B are restarts of it."),
    ] = "",
    pattern: Annotated[
        str, typer.Option(metavar="REGEX", help="Pattern for the step and the numbers in a line.")
    ] = "",
    first: Annotated[
        int, typer.Option("--from", metavar="STEP", min=0, help="First step to compare.")
    ] = 0,
    last: Annotated[
        int, typer.Option("--to", metavar="STEP", min=0, help="Last step to compare.")
    ] = 0,
    html: Annotated[str, typer.Option(metavar="FILE", help="Write the timeline as a page.")] = "",
) -> Result:
    """Compare the logs of runs, and name the first event that differs.

    Without --reference, A is taken for the uninterrupted run and B for the restart. Logs of other
    programs hold rounded numbers and no state: what they cannot show is said.
    """
    from ftckpt.api.replaying import replay_compare

    invocation = invoked(ctx)
    invocation.report(target=log_a)
    if html:
        check_file("--html", html)
    judgement = replay_compare(
        log_a, log_b, reference=reference, pattern=pattern, first=first, last=last
    )
    invocation.report(**record(judgement))
    invocation.print(text(judgement))
    if html:
        write_page(html, judgement)
        invocation.report(html=html)
    return result(judgement)
