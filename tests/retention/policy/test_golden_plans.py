"""Plans that are kept in files: one a rule and one a protection.

Each file holds a root in the words of `scenarios.py` and, below `---`, what is decided.
`WRITE_GOLDEN=1` writes the decisions anew; look at the difference before committing it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftckpt.retention.document import rows
from ftckpt.retention.policy.decide import decide
from ftckpt.retention.policy.plan import RetentionPlan
from tests.retention.scenarios import NOW, scenario

CASES = sorted((Path(__file__).parents[2] / "data/golden/retention").glob("*.txt"))
MARK = "---\n"


def shown(plan: RetentionPlan) -> str:
    lines = [f"{row.verdict} {row.name} | {row.reason}" for row in rows(plan)]
    lines += [f"order {' '.join(plan.order)}"] if plan.order else []
    lines += [f"frees {plan.frees}"] if plan.frees else []
    lines += [f"broken {b.floor} | {b.message} | {b.hint}" for b in plan.broken]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_plan(path: Path) -> None:
    text, _, expected = path.read_text().partition(MARK)
    given = scenario(text)
    plan = decide(given.entries, given.policy, NOW, last_run=given.last_run)
    if os.environ.get("WRITE_GOLDEN"):
        expected = shown(plan)
        path.write_text(text + MARK + expected)
    assert shown(plan) == expected
    again = decide(reversed(given.entries), given.policy, NOW, last_run=given.last_run)
    assert again == plan


def test_there_are_enough() -> None:
    assert len(CASES) >= 40
