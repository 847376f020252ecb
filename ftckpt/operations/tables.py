"""Tables that a user names: rules of how tensors are divided, and other names for parameters."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

from ftckpt.errors import UsageError
from ftckpt.operations.definition import option

if TYPE_CHECKING:
    from ftckpt.checkpoint.rules import Rules
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
    from ftckpt.checkpoint.rules import parse_rules
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
