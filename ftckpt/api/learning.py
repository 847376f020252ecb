"""What the tables of families say: `families`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.operations.tables import read_text

if TYPE_CHECKING:
    from ftckpt.formats.families.check import CheckedSide


def families(family: str, *, config: str, names: str = "") -> tuple[CheckedSide, ...]:
    """Try a table of a model family on a model: names and shapes there and back.

    Args:
        family: a built-in table, or the path of a TOML file.
        config: the path of a model's `config.json`.
        names: one side of the table; "" for all that it has.

    Returns:
        Each side with its rows, and its problems where the table does not fit.

    Raises:
        UsageError: the table or the configuration cannot be read, or says too little.
        UnsupportedError: the configuration is of a model that the table is not for.
    """
    from ftckpt.formats.families.check import check_family
    from ftckpt.formats.huggingface.config import parsed_config

    return tuple(check_family(family, parsed_config(read_text(config), config), names))
