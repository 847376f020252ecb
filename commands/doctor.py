"""`ftckpt doctor`: what this machine and a place can do, found by trying it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block, table
from ftckpt.errors import ExitCode
from ftckpt.findings import counted
from ftckpt.operations.definition import argument

if TYPE_CHECKING:
    from ftckpt.capabilities import Check

EXAMPLES = (
    ("ftckpt doctor", "packages, processor, limits and GPUs of this machine"),
    (
        "ftckpt doctor /ckpt/run7",
        "and locks, hard links, renames, clock and room of its filesystem",
    ),
    ("ftckpt doctor s3://bucket/run7", "and conditions, versions, lifecycle rules of the bucket"),
    (
        "ftckpt doctor /ckpt/run7 --json | jq '.checks[] | select(.state == \"problem\")'",
        "what to mend, for a script",
    ),
)
CODES = {
    ExitCode.OK: "nothing that makes a verb fail or endangers a checkpoint",
    ExitCode.USAGE: "the place is a file",
    ExitCode.NOT_FOUND: "no such directory or bucket",
    ExitCode.UNAVAILABLE: "",
    ExitCode.DENIED: "the place cannot even be listed",
    ExitCode.UNSUPPORTED: "the package for this kind of URL is not installed",
    ExitCode.PARTIAL: "a problem: it is listed, with what to do",
}


def command(
    invocation: Invocation,
    root: Annotated[str, argument("[ROOT]", "Directory or URL to try; else the machine.")] = "",
) -> Result:
    """Show what this machine and a place can do, and what to do about the rest.

    Each line was tried or looked up, and says what follows from it. A place is tried with small
    files of our own, which are removed again; those of a killed run go with the next one. A note is
    something to know; a problem makes a verb fail or endangers a checkpoint.
    """
    from ftckpt.capabilities import State, examine

    invocation.report(target=root or None, checks=[])
    checks = []
    for check in examine(root, stores=invocation.stores):
        checks.append(check)
        invocation.report(checks=[one._asdict() for one in checks])
    notes = sum(one.state is State.NOTE for one in checks)
    problems = [one for one in checks if one.state is State.PROBLEM]
    here = [one for one in checks if one.area != "place"]
    invocation.print(block("this machine:", _table(here)))
    if root:
        there = [one for one in checks if one.area == "place"]
        invocation.print(block("", f"{root}:", _table(there)))
    counts = f"{counted(len(problems), 'problem') if problems else 'no problem'}, "
    counts += counted(notes, "note")
    invocation.print()
    invocation.print(counts)
    for one in problems:
        invocation.print(f"  {one.name}: {one.found}" + (f": {one.do}" if one.do else ""))
    if problems:
        first, *rest = problems
        more = f" (and {len(rest)} more)" if rest else ""
        return Result(
            ExitCode.PARTIAL, f"{first.name}: {first.found}: {first.means}{more}", first.do
        )
    return Result(ExitCode.OK, counts)


def _table(checks: Sequence[Check]) -> str:
    return table(
        ["", "of", "found", "means"],
        [
            [one.state, one.name, one.found, one.means + (f": {one.do}" if one.do else "")]
            for one in checks
        ],
    )
