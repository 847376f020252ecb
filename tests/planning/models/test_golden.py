"""Every golden value of planning, by the library's own functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.planning.models.golden_answers import answer_to

ENTRIES = json.loads((Path(__file__).parents[2] / "data/golden/plan.json").read_text())


def flat(value: Any) -> list[float]:
    if isinstance(value, list | tuple):
        return [number for one in value for number in flat(one)]
    return [float(value)]


def test_all_of_the_table_is_there() -> None:
    assert len(ENTRIES) == 98
    assert len({entry["id"] for entry in ENTRIES}) == 98


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["id"])
def test_golden(entry: dict[str, Any]) -> None:
    answer = answer_to(entry["id"])
    assert answer is not None
    tolerance = entry["tolerance"]
    expected = pytest.approx(
        flat(entry["expected"]), rel=tolerance.get("rel", 0), abs=tolerance.get("abs", 0)
    )
    assert flat(answer(entry["inputs"])) == expected
