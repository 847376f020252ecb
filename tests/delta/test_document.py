"""docs/delta-format.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from ftckpt.delta import BLOCK, NAME, Form
from ftckpt.delta.codec.planes import CHUNK, JOINED
from ftckpt.delta.codec.predict import RULES
from ftckpt.delta.index import HEAD, MAGIC, MAX_BYTES, ROW

TEXT = (Path(__file__).parents[2] / "docs" / "delta-format.md").read_text()


def test_forms_and_rules_are_those_of_the_code() -> None:
    forms = dict(re.findall(r"^\| (\d) (\w+) \|", TEXT, re.MULTILINE))
    assert {int(n): name for n, name in forms.items()} == {f.value: f.name.lower() for f in Form}
    for rule in RULES.values():
        row = next(r for r in TEXT.splitlines() if r.startswith("|") and f"`{rule.name}`" in r)
        _, _, level, coefficients, *_ = (cell.strip() for cell in row.split("|"))
        assert int(level) == rule.level
        assert len([c for c in coefficients.split(",") if c.strip()]) == rule.coefficients


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"`{MAGIC.decode()}`" in TEXT
    assert f"`{NAME}`" in TEXT
    assert f"elements of a block: {BLOCK}" in TEXT
    assert f"chunks of {CHUNK}," in TEXT
    assert f"{ROW.size} R" in TEXT
    assert HEAD.size == 8 + 4 + 4 + 8 + 8
    assert f"{MAX_BYTES >> 20} MiB" in TEXT
    assert "J: {}, {} or {}".format(*JOINED) in TEXT
