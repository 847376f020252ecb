"""`ftckpt families`: the tables of model families, and whether one fits a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from ftckpt.commands.cli.invocation import Invocation, Result
from ftckpt.commands.cli.render import block, table
from ftckpt.commands.cli.transfer_options import read_text
from ftckpt.errors import ExitCode, UsageError
from ftckpt.findings import counted
from ftckpt.operations.definition import argument, option

if TYPE_CHECKING:
    from ftckpt.formats.families.check import CheckedSide

EXAMPLES = (
    ("ftckpt families", "the built-in tables, and whose names each has"),
    ("ftckpt families llama --config config.json", "what becomes of each tensor of a model"),
    ("ftckpt families mine.toml --config config.json", "whether a table of your own fits"),
)
CODES = {
    ExitCode.OK: "every tensor has its place on each side, and comes back",
    ExitCode.USAGE: "the table does not fit the model, or cannot be read; the tensors are named",
    ExitCode.UNSUPPORTED: "config.json is of a model that the table is not for",
}


def command(
    invocation: Invocation,
    family: Annotated[str, argument("[TABLE]", "A built-in table, or a TOML file; else all.")] = "",
    config: Annotated[str, option("FILE", "config.json of a model to try the table on.")] = "",
    names: Annotated[
        str, option("SIDE", "megatron, torchtitan, meta or packed; else all it has.")
    ] = "",
) -> Result:
    """List the tables of model families, or check one against a model.

    A table says how convert translates names. The check needs no checkpoint: it imagines the
    tensors that config.json describes, translates them to each side of the table and back, and
    prints the names and shapes.
    """
    invocation.report(target=family or None, config=config or None)
    if not family:
        if config:
            raise UsageError(
                "--config is for one table", hint="ftckpt families TABLE --config FILE"
            )
        return _listed(invocation)
    if not config:
        raise UsageError(f"{family} is tried on a model", hint="--config FILE: its config.json")
    from ftckpt.formats.families.check import check_family
    from ftckpt.formats.huggingface.config import parsed_config

    sides = check_family(family, parsed_config(read_text(config), config), names)
    invocation.report(sides=[{**one._asdict(), "rows": [r._asdict() for r in one.rows]}
                             for one in sides])  # fmt: skip
    for side in sides:
        _print(invocation, side)
    problems = [f"{one.side}: {problem}" for one in sides for problem in one.problems]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return invocation.fail(ExitCode.USAGE, f"{family} does not fit: {problems[0]}{more}")
    said = f"{family} fits {config}: {', '.join(one.side for one in sides) or 'shapes alone'}"
    invocation.print(said)
    return Result(ExitCode.OK, said)


def _listed(invocation: Invocation) -> Result:
    from ftckpt.formats.families.tables import DIALECTS, family, family_names

    found = []
    for name in family_names():
        one = family(name)
        sides = [d for d in DIALECTS if any(d in entry.names for entry in one.natives)]
        sides += ["maxtext"] * bool(one.arrays)
        held = {layout for part in one.parts for layout in part.beginnings} - {"hf"}
        sides += sorted(held)
        found.append({"family": name, "sides": ["megatron"] * bool(one.entries) + sides})
    invocation.report(families=found)
    rows = [[one["family"], ", ".join(one["sides"])] for one in found]
    invocation.print(table(["family", "translated to Hugging Face from"], rows))
    return Result(ExitCode.OK, counted(len(found), "table"))


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
