"""The catalog of formats."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from ftckpt.checkpoint.rules import Rules
from ftckpt.formats.catalog import FORMATS, formats


def test_a_users_rules_reach_every_format_that_cuts_by_rules() -> None:
    mine = Rules("mine", ())
    takes = {f.name for f in FORMATS if is_dataclass(f) and "rules" in {x.name for x in fields(f)}}
    given = {f.name for f in formats(mine) if getattr(f, "rules", None) is mine}
    assert takes == given
    assert takes


def test_without_rules_the_formats_are_as_they_are() -> None:
    assert formats(None) is FORMATS
