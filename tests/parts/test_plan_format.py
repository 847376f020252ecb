"""What tasks are called, whose they are and how results are written: the format of a plan.

Two machines may work on one plan only if they agree on all of it. Where this test fails, raise
`ftckpt.parts.plan.FORMAT` and put the new digest here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import xxhash

from ftckpt.parts import plan
from ftckpt.parts.plan import ShareRecord
from tests.commands.golden import DATA

from .answers import answer, small_tasks

KNOWN = {7: "34c9d2d78c03cb7f"}


def form(value: Any) -> Any:
    """Return of what a result consists: numbers differ by a bit between processors."""
    if isinstance(value, dict):
        return {name: form(value[name]) for name in sorted(value)}
    if isinstance(value, list):
        return [form(one) for one in value]
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def test_a_change_raises_the_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_tasks(monkeypatch)
    units: list[Any] = []
    real = ShareRecord.dump

    def dump(self: ShareRecord) -> bytes:
        results = [(key, form(self.units[key])) for key in sorted(self.units)]
        units.append([str(self.part), self.stage, results])
        return real(self)

    monkeypatch.setattr(ShareRecord, "dump", dump)
    for words in (
        ("verify", DATA / "run/step-2", "--level", "values"),
        ("seal", DATA / "dcp/hsdp", "--manifest", tmp_path / "m.json"),
        ("diff", DATA / "run/step-1", DATA / "run/step-2", "--component", "model"),
    ):
        for number in range(2):
            answer(*words, "--part", f"{number}/2", "--parts", tmp_path, "-j1")
    assert len(units) == 6
    assert xxhash.xxh3_64_hexdigest(repr(units).encode()) == KNOWN[plan.FORMAT]
