"""The tables of split rules that come built in, one TOML file a family in `rules/`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from ftckpt.checkpoint.sharding import Rules, parse_rules
from ftckpt.errors import UsageError


def families() -> tuple[str, ...]:
    """Return the names of the built-in tables, sorted."""
    folder = files("ftckpt.formats") / "rules"
    return tuple(sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".toml")))


def built_in(family: str, values: Mapping[str, int] | None = None) -> Rules:
    """Return a built-in table.

    Args:
        family: one of `families()`.
        values: see `ftckpt.checkpoint.sharding.parse_rules`.

    Raises:
        UsageError: the table does not exist.
    """
    if family not in families():
        raise UsageError(
            f"there are no built-in rules for {family!r}", hint=f"known: {', '.join(families())}"
        )
    text = (files("ftckpt.formats") / "rules" / f"{family}.toml").read_text("utf-8")
    return parse_rules(text, f"{family}.toml", values)
