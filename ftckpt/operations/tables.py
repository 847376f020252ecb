"""Tables that a user names: of families, of how tensors are divided, of other names."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NamedTuple

from ftckpt.errors import ExitCode, UsageError
from ftckpt.findings import counted
from ftckpt.observer import SILENT, Observer
from ftckpt.reports import IF_ANY, UNSAID
from ftckpt.storage import StoreOptions

from .definition import argument, operation, option
from .opening import STORES

if TYPE_CHECKING:
    from ftckpt.checkpoint.sharding import Rules
    from ftckpt.formats.families.check import CheckedSide
    from ftckpt.transfer.request.renaming import Rename


RulesFile = Annotated[
    str,
    option("FILE.toml", "Table of how tensors divide over ranks, or a name: llama, …", "--rules"),
]


def read_rules(path: str) -> Rules | None:
    """Return the user's table of split rules, or None where none was given.

    A built-in table is given by its name, unless a file has that name.

    Raises:
        UsageError: the file cannot be read, or is not such a table.
    """
    if not path:
        return None
    from ftckpt.checkpoint.sharding import parse_rules
    from ftckpt.formats.state.rule_tables import built_in, families

    # Megatron's rules depend on the job's arguments, which its own readers know.
    if path in families() and "megatron" not in path and not os.path.exists(path):
        return built_in(path)
    return parse_rules(read_text(path), path)


def read_text(path: str) -> str:
    """Return a small text file that the user named.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text: {error}") from error


def read_renames(path: str) -> tuple[Rename, ...]:
    """Return a table of other names for parameters; nothing for "".

    Raises:
        UsageError: the file cannot be read, or is not such a table.
    """
    if not path:
        return ()
    from ftckpt.transfer.request.renaming import parse_renames

    return tuple(parse_renames(read_text(path), path))


class KnownFamily(NamedTuple):
    """A built-in table.

    Attributes:
        family: its name.
        sides: whose names it translates to those of Hugging Face.
    """

    family: str
    sides: list[str]


@dataclass(frozen=True, kw_only=True)
class FamilyTables:
    """The tables that there are, or one that was tried on a model.

    Attributes:
        families: the built-in ones, where none was named.
        sides: each side of the one that was named: its rows, and its problems where the table does
            not fit.
        code: USAGE where it does not fit.
        message: the first problem.
    """

    families: tuple[KnownFamily, ...] | None = field(default=None, metadata=IF_ANY)
    sides: tuple[CheckedSide, ...] | None = field(default=None, metadata=IF_ANY)
    code: ExitCode = field(default=ExitCode.OK, metadata=UNSAID)
    message: str = field(metadata=UNSAID)


@operation(
    examples=(
        ("ftckpt families", "the built-in tables, and whose names each has"),
        ("ftckpt families llama --config config.json", "what becomes of each tensor of a model"),
        ("ftckpt families mine.toml --config config.json", "whether a table of your own fits"),
    ),
    codes={
        ExitCode.OK: "every tensor has its place on each side, and comes back",
        ExitCode.USAGE: "the table does not fit the model or cannot be read; the tensors are named",
        ExitCode.UNSUPPORTED: "config.json is of a model that the table is not for",
    },
)
def families(
    family: Annotated[str, argument("[TABLE]", "A built-in table, or a TOML file; else all.")] = "",
    *,
    config: Annotated[str, option("FILE", "config.json of a model to try the table on.")] = "",
    names: Annotated[
        str, option("SIDE", "megatron, torchtitan, meta or packed; else all it has.")
    ] = "",
    stores: StoreOptions = STORES,
    on: Observer = SILENT,
) -> FamilyTables:
    """List the tables of model families, or try one on a model.

    A table says how convert translates names. The check needs no checkpoint: it imagines the
    tensors that config.json describes, translates them to each side of the table and back, and
    prints the names and shapes.

    Raises:
        UsageError: the table or the configuration cannot be read, or says too little.
        UnsupportedError: the configuration is of a model that the table is not for.
    """
    on.report(target=family or None, config=config or None)
    if not family:
        if config:
            raise UsageError(
                "--config is for one table", hint="ftckpt families TABLE --config FILE"
            )
        known = _built_in()
        return FamilyTables(families=known, message=counted(len(known), "table"))
    if not config:
        raise UsageError(f"{family} is tried on a model", hint="--config FILE: its config.json")
    from ftckpt.formats.families.check import check_family
    from ftckpt.formats.huggingface.config import parsed_config

    sides = tuple(check_family(family, parsed_config(read_text(config), config), names))
    problems = [f"{one.side}: {problem}" for one in sides for problem in one.problems]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        said = f"{family} does not fit: {problems[0]}{more}"
        return FamilyTables(sides=sides, code=ExitCode.USAGE, message=said)
    said = f"{family} fits {config}: {', '.join(one.side for one in sides) or 'shapes alone'}"
    return FamilyTables(sides=sides, message=said)


def _built_in() -> tuple[KnownFamily, ...]:
    from ftckpt.formats.families.tables import DIALECTS, family, family_names

    found = []
    for name in family_names():
        one = family(name)
        sides = ["megatron"] * bool(one.entries)
        sides += [d for d in DIALECTS if any(d in entry.names for entry in one.natives)]
        sides += ["maxtext"] * bool(one.arrays)
        held = {layout for part in one.parts for layout in part.beginnings} - {"hf"}
        found.append(KnownFamily(name, sides + sorted(held)))
    return tuple(found)
