"""`ftckpt replay compare`: the logs of runs that were made before."""

from __future__ import annotations

from typing import Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.errors import ExitCode
from ftckpt.operations.definition import argument, option
from ftckpt.storage.local.writable import check_file

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
    invocation: Invocation,
    log_a: Annotated[str, argument("LOG_A", "Directory, JSON lines, or text.")],
    log_b: Annotated[str, argument("LOG_B", "The log of another run.")],
    reference: Annotated[
        str, option("LOG", "The uninterrupted run; A and B are restarts of it.")
    ] = "",
    pattern: Annotated[
        str, option("REGEX", "Pattern for the step and the numbers in a line.")
    ] = "",
    first: Annotated[int, option("STEP", "First step to compare.", "--from", min=0)] = 0,
    last: Annotated[int, option("STEP", "Last step to compare.", "--to", min=0)] = 0,
    html: Annotated[str, option("FILE", "Write the timeline as a page.")] = "",
) -> Result:
    """Compare the logs of runs, and name the first event that differs.

    Without --reference, A is taken for the uninterrupted run and B for the restart. Logs of other
    programs hold rounded numbers and no state: what they cannot show is said.
    """
    from ftckpt.api.replaying import replay_compare

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
