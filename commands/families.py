"""`ftckpt families`: the tables of model families, and whether one fits a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block, table
from ftckpt.operations import tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftckpt.formats.families.check import CheckedSide
    from ftckpt.operations.tables import FamilyTables

operation = tables.families


def render(invocation: Invocation, report: FamilyTables, _: Mapping[str, Any]) -> Result:
    """Print the list, or the rows of each side and what does not fit."""
    if report.families is not None:
        rows = [[one.family, ", ".join(one.sides)] for one in report.families]
        invocation.print(table(["family", "translated to Hugging Face from"], rows))
        return Result(report.code, report.message)
    for side in report.sides or ():
        _print(invocation, side)
    if report.code:
        return invocation.fail(report.code, report.message)
    invocation.print(report.message)
    return Result(report.code, report.message)


def _print(invocation: Invocation, side: CheckedSide) -> None:
    rows = [
        [row.hf, _shape(row.shape), row.tensors, row.name, _shape(row.whole), row.how]
        for row in side.rows
    ]
    columns = ["Hugging Face", "shape", "tensors>", side.side, "shape", "how"]
    invocation.print(block(table(columns, rows), ""))
    for problem in side.problems:
        invocation.print(f"{side.side}: {problem}")


def _shape(shape: tuple[int, ...]) -> str:
    return str(list(shape))
