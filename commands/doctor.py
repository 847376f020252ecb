"""`ftckpt doctor`: what this machine and a place can do, found by trying it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block, table
from ftckpt.findings import counted
from ftckpt.operations import surveying

if TYPE_CHECKING:
    from ftckpt.capabilities import Check
    from ftckpt.operations.surveying import Examination

operation = surveying.doctor


def render(invocation: Invocation, report: Examination, given: Mapping[str, Any]) -> Result:
    """Print a table of the machine and one of the place, and what is to be done."""
    from ftckpt.capabilities import State

    root, checks = given["root"], report.checks
    notes = sum(one.state is State.NOTE for one in checks)
    problems = [one for one in checks if one.state is State.PROBLEM]
    invocation.print(block("this machine:", _table([c for c in checks if c.area != "place"])))
    if root:
        there = [one for one in checks if one.area == "place"]
        invocation.print(block("", f"{root}:", _table(there)))
    counts = f"{counted(len(problems), 'problem') if problems else 'no problem'}, "
    counts += counted(notes, "note")
    invocation.print()
    invocation.print(counts)
    for one in problems:
        invocation.print(f"  {one.name}: {one.found}" + (f": {one.do}" if one.do else ""))
    return Result(report.code, report.message, report.hint)


def _table(checks: Sequence[Check]) -> str:
    return table(
        ["", "of", "found", "means"],
        [
            [one.state, one.name, one.found, one.means + (f": {one.do}" if one.do else "")]
            for one in checks
        ],
    )
